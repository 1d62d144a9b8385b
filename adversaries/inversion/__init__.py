"""Attacks that reconstruct examples from updates."""
