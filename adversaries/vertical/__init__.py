"""Attacks on tables held in halves: on labels by a party with features, on features by the party with labels."""
