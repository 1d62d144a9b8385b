"""How plug-ins are found by name, made from settings, and told apart by their code."""
