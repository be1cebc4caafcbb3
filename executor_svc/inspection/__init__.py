"""What can be run, and whether a model can: asked by `octavo models` and `octavo inspect`, answered in JSON."""
