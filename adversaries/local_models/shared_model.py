"""The baseline of local-model reconstruction: a model that was sent, claimed as the local one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adversaries.local_models.model_sources import ModelAttack
from fedsim.base.errors import ConfigError
from fedsim.interfaces.attack import Knowledge, Paper, Progress, Target
from fedsim.interfaces.findings import LocalModel
from fedsim.inversion.local_updates import PAPER
from fedsim.recording.wire_format import Update


@dataclass(frozen=True, kw_only=True)
class SharedModel(ModelAttack):
    """Claim that a broadcast or returned model is the client's optimal local model.

    Args:
        source: `last-returned`, the last w_T that the victim returned, or `global`, w_t of the last
            inspected round.

    References:
        [Driouich2022], the proxies of Sect. 4 and Table 1. Differs: nothing.
    """

    paper: ClassVar[Paper] = PAPER
    needs_num_examples: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.source not in self.transcript_sources:
            raise ConfigError(f"source: expected {' or '.join(self.transcript_sources)}, got '{self.source}'")

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse nothing: what was sent is claimed as it is."""

    def _run(self, target: Target, progress: Progress) -> LocalModel:
        state, _ = self._source_state(target)
        progress(1, 1, {"objective": 0.0})  # there is nothing to minimise
        return LocalModel(state=dict(state))
