"""What the commands share on a terminal: tables, colours, figures for people, errors with a hint."""
