"""What the command line and a Python program do with a run: make it, resume it, attack it, report on it."""
