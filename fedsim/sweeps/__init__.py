"""Many experiments at once: the grid of a sweep file, its cells with what is kept of them, and the table of scores."""
