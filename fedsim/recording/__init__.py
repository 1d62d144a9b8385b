"""Recordings of what a curious server sees, with hashes that detect damage and alteration."""
