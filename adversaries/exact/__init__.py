"""Attacks that read a client's inputs off the update of a first linear layer, to float precision."""
