"""A model that was sent, claimed to be the victim's local one: the baseline of LMRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from adversaries.local_models.model_sources import ModelAttack
from adversaries.local_updates import PAPER
from fedsim.attacks import Knowledge, Paper, Progress
from fedsim.errors import ConfigError
from fedsim.findings import Finding, LocalModel
from fedsim.recording.transcript import Transcript


@dataclass(frozen=True, kw_only=True)
class SharedModel(ModelAttack):
    """Claim that a model that was sent is the one that the client would have trained alone.

    Args:
        source: `last-returned`, the last w_T that the victim returned, or `global`, w_t of the last inspected round.

    References:
        Driouich et al.: Local Model Reconstruction Attacks in Federated Learning and their Uses, 2022, the proxies of
        Sect. 4 and Table 1. Differs: nothing.
    """

    paper: ClassVar[Paper] = PAPER

    def __post_init__(self) -> None:
        if self.source not in self.messages:
            raise ConfigError(f"source: expected {' or '.join(self.messages)}, got '{self.source}'")

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        state, _ = self._state(transcript, knowledge, victim)
        progress(1, 1, {"objective": 0.0})  # there is nothing to minimise
        return LocalModel(state=dict(state))
