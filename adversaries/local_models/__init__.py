"""Local-model reconstruction: attacks that decode a client's optimal local model."""
