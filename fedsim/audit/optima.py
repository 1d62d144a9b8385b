"""Optimal local models of clients, computed once and kept in the run folder."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from fedsim.audit.cache import FindingCache
from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.local_optimum import OPTIMUM_METHOD, local_optimum
from fedsim.audit.finding_files import load_finding
from fedsim.base.randomness import use_one_thread
from fedsim.interfaces.findings import LocalModel
from fedsim.recording.wire_format import State

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OptimumStore:
    """Store of the optimal local models of the clients of a run."""

    cache: FindingCache
    case: Case

    def __call__(self, client: int, *, other_start: bool = False) -> State:
        """Return theta_c*, the model that `client` would train from w_0 on its own data only.

        Args:
            other_start: start from random weights other than w_0, which are close to nothing in the
                messages.

        Raises:
            UnknownTruthError: the client's data are not known.
        """
        path = self._path(client, other_start=other_start)
        if not self.cache.is_intact(path):
            optimum = LocalModel(state=self._train_optimum(client, other_start=other_start))
            self.cache.save(optimum, path, {"client": client})
        finding, _ = load_finding(path)
        assert isinstance(finding, LocalModel)
        return finding.state

    def is_saved(self, client: int) -> bool:
        """Return whether the optimum that starts from w_0 is in the run folder."""
        return self.cache.is_intact(self._path(client, other_start=False))

    def _path(self, client: int, *, other_start: bool) -> Path:
        name = f"client-{client}{'-other-start' if other_start else ''}.safetensors"
        return self.cache.folder.optima / OPTIMUM_METHOD / name

    def _train_optimum(self, client: int, *, other_start: bool) -> State:
        experiment = self.case.require_experiment()
        data, labels = experiment.data.train(client)
        start = " from other random weights" if other_start else ""
        log.info("client %d: training its optimal local model%s, for comparison", client, start)
        # The attack that asks for an optimum may have switched gradients off.
        with use_one_thread(), torch.enable_grad():
            return local_optimum(
                experiment.new_model(),
                experiment.random_start() if other_start else experiment.initial_model_state(),
                experiment.data.to_model(data),
                labels,
                experiment.loss,
            )
