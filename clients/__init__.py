"""Client side of a federation: the ClientApp, the defenses, and defenses as Flower mods."""

PART_OF = "fedsim"
