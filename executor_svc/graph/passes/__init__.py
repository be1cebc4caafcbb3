"""The passes, one a file, and the order in which they run."""
