"""Skeletons that `fedsim new` copies: an experiment, and plug-ins that pass `fedsim check`."""
