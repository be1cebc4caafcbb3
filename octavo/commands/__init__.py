"""The subcommands of `octavo`, a module each: `add_parser` declares the flags, `run` does the work."""
