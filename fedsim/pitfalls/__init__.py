"""Pitfalls of evaluations that show in an experiment, attack or sweep file before it is run."""
