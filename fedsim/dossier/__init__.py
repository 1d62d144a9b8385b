"""Dossiers for privacy officers: what a run or a sweep shows, in plain words, and how to verify it."""
