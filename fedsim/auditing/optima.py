"""Each client's optimal local model, with which findings are compared; computed once and kept in the run folder."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from fedsim.auditing.cache import Cache
from fedsim.errors import DataError
from fedsim.evaluation.case import Case
from fedsim.evaluation.local_optimum import METHOD, local_optimum
from fedsim.findings import LocalModel
from fedsim.randomness import one_thread
from fedsim.recording.finding_files import load_finding
from fedsim.wire.messages import State

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Optima:
    """Optimal local models of the clients of a run."""

    cache: Cache
    case: Case

    def __call__(self, client: int, *, elsewhere: bool = False) -> State:
        """theta_c*, the model that `client` would train on its own data alone, starting from w_0.

        Args:
            elsewhere: start from other random weights than w_0, which are near to nothing in the messages.

        Raises:
            DataError: nobody knows the client's data.
            RunError: it does not train.
        """
        path = self._place(client, elsewhere=elsewhere)
        if not self.cache.is_ours(path):
            self.cache.keep(LocalModel(state=self._found(client, elsewhere=elsewhere)), path, {"client": client})
        finding, _ = load_finding(path)
        assert isinstance(finding, LocalModel)
        return finding.state

    def is_there(self, client: int) -> bool:
        """Whether the one that starts from w_0 is in the run folder."""
        return self.cache.is_ours(self._place(client, elsewhere=False))

    def _place(self, client: int, *, elsewhere: bool) -> Path:
        name = f"client-{client}{'-other-start' if elsewhere else ''}.safetensors"
        return self.cache.folder.optima / METHOD / name

    def _found(self, client: int, *, elsewhere: bool) -> State:
        experiment = self.case.experiment
        if experiment is None:
            raise DataError(f"client {client}: only an experiment says what it holds, so it has no optimal model")
        data, labels = experiment.data.train(client)
        beginning = " from other random weights" if elsewhere else ""
        log.info("client %d: training its optimal local model%s, for comparison", client, beginning)
        with one_thread(), torch.enable_grad():  # the attack that asks for it may have switched gradients off
            return local_optimum(
                experiment.new_model(),
                experiment.other_start() if elsewhere else experiment.initial_state(),
                experiment.data.to_model(data),
                labels,
                experiment.loss,
            )
