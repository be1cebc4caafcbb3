"""What `octavo doctor` looks at. Nothing here changes anything, and nothing imports torch."""
