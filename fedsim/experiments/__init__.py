"""An experiment file, what is built from it, and the run folder that it fills."""
