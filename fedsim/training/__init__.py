"""Local training: of one client, of several at once, and to convergence on one client's data."""
