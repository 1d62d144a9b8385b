"""Attacks on top of a model or an update: sources, attributes, samples."""
