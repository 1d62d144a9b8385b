"""Engines run the clients of a federation. Every engine launches the same ServerApp and ClientApp.

`serial` works in this process without Ray, `ray` in actors through Flower's simulation engine, and
`flower` on a SuperLink and SuperNodes. Of the last, `deployed` is the app that runs there,
`processes` starts and ends its processes, and `watchdog` ends them when this process is killed.

All share `cohort` (one message carries the broadcast once, and the work of many clients),
`client_state` (state that clients keep from round to round), `arrays` (lazy arrays in memory or on
disk) and `readiness` (checks that the nodes are connected, run the same versions and can work).
"""
