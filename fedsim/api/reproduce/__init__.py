"""Papers' tables again: the figures that they print, what we got in their place, and the sweeps that get it."""
