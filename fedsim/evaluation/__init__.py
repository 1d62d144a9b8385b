"""What findings are worth: the only room that holds the truth."""
