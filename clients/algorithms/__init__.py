"""Algorithms of clients, one in each file; each `train_client` reads like its paper's algorithm."""
