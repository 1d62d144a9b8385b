"""Plan the attacks of an adversary, grant their knowledge, run them and score their findings."""
