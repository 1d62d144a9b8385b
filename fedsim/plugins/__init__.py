"""Plug-ins: found by name, built from settings, and identified by their code."""
