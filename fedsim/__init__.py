"""fedsim: a federated-learning simulator with a pluggable honest-but-curious server."""
