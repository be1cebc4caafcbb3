"""The passes, one a file; optimize.py has the order in which they run."""
