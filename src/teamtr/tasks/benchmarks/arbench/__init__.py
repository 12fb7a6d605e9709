"""AR-Bench: three interactive games, and whoever plays their other roles."""
