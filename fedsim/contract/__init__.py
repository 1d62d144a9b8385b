"""Contract of plug-ins: checks on tiny cases, the same for fedsim's own and for others'."""
