"""The experiment file, the objects built from it, and the run folder."""
