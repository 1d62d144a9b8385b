"""Grids of experiments: the sweep file, its cells and their store, and the table of scores."""
