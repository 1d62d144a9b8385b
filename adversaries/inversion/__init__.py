"""Gradient inversion: attacks that reconstruct training examples from updates."""
