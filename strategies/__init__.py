"""The server side: the curious wrapper round any Flower strategy, and the ServerApp."""

PART_OF = "fedsim"
