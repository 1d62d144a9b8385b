"""fedsim's engine `ray`."""

from __future__ import annotations

from functools import partial

from frameworks.fedsim_engine import run_on

run = partial(run_on, "ray")
