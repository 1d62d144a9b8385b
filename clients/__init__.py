"""The client side: the ClientApp, defenses, and defenses as Flower mods."""

PART_OF = "fedsim"
