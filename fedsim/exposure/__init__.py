"""Measures of how exposed a client's data are, for the client or the evaluator, who have them."""
