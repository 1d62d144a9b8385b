"""Attacks that decode a client's local model."""
