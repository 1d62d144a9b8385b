"""Attacks on answers to queries, as of federated analytics, in which nothing is trained."""
