"""The attacks, one paper a file. None of them may import `fedsim.audit.evaluation`."""

PART_OF = "fedsim"
