"""Attacks that reconstruct texts."""
