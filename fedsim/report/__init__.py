"""The page, its pictures, and what a score says."""
