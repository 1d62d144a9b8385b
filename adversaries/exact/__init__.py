"""Attacks that read exact inputs off the update of a first linear layer."""
