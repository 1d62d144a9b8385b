"""Defenses of clients, one a file; each says in its docstring what it promises."""
