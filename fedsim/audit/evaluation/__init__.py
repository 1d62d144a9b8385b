"""Judge findings against the truth, which no attack may read."""
