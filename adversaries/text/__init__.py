"""Attacks that reconstruct texts from updates of text models."""
