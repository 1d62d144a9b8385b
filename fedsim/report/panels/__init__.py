"""Panels of fedsim's own: one file for each section of `report.html`, with its template of the same name."""
