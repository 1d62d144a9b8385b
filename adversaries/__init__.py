"""The attacks, one paper a file. None of them may import `fedsim.evaluation`."""

PART_OF = "fedsim"
