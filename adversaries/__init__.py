"""The attacks, one paper a file. None of them may import `fedsim.scoring`."""

PART_OF = "fedsim"
