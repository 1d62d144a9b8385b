"""Attacks on models of trees, whose splits and covers are statements about single records."""
