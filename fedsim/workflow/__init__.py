"""What the command line and a Python program do with a run: make it, go on with it, attack it, report on it."""
