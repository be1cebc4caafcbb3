"""What can be run, whether a model can, and a model written anew: for `octavo models`, `inspect` and `export`."""
