"""Local training: alone, several clients at once, and until nothing moves."""
