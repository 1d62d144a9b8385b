"""Server side of a federation: the ServerApp, and a wrapper that records any Flower strategy."""

PART_OF = "fedsim"
