"""Skeletons that `fedsim new` copies: an experiment that runs, and plug-ins that keep to their contract as they are."""
