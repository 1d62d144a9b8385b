"""How exposed a client's data are, computed by who holds them."""
