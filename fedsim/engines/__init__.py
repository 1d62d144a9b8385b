"""Where client work happens. Every engine launches the same ServerApp and ClientApp.

`serial` works in this process without Ray, `ray` in actors through Flower's simulation engine, and
`flower` on a SuperLink and SuperNodes (`deployed` is what runs there, `processes` starts and ends them,
`guard` ends them when nobody else can).

All share `cohort` (one message carries the broadcast once and many clients' work), `memory` (what clients keep
from round to round), `arrays` (which wait in memory or on disk) and `readiness` (are the nodes there, alike, and able
to work?).
"""
