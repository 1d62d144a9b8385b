"""Inference attacks: membership, properties, attributes, labels, sources and typical samples."""
