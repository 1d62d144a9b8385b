"""Defenses of clients, one in each file; each docstring states the guarantee, if any."""
