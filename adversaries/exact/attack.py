"""What the attacks on a first linear layer share: from columns of the mixture to a finding."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.exact.consistency import certified, cleaned, repaired
from adversaries.exact.layer import Layer, labels_of, read_layer
from adversaries.exact.mixture import Mixture
from fedsim.attacks import Attack, Knowledge, Paper, Progress, single_update
from fedsim.findings import Finding, Reconstruction
from fedsim.recording.transcript import Transcript

log = logging.getLogger("fedsim." + __name__)


@dataclass(frozen=True, kw_only=True)
class FirstLayerAttack(Attack):
    """Base of the attacks that read a client's inputs off the update of the first linear layer of a model.

    They need no labels, number of steps, batch size or learning rate, and read one update of any number of steps of
    SGD, with momentum, weight decay, clipping or a proximal term; Adam and noise leave the span of the inputs. N need
    only be an upper bound, up to what the layer can tell apart, but nothing is certified then. Weights and biases of
    the layer are taken to have one learning rate, and the examples to enter the model unchanged: where each is seen
    once, what is found is the augmented example. A subclass finds columns of the mixture.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    paper: ClassVar[Paper] = Paper(
        title="SPEAR: Exact Gradient Inversion of Batches in Federated Learning",
        authors="Dimitrov, Baader, Müller, Vechev",
        venue="NeurIPS",
        year=2024,
        url="https://arxiv.org/abs/2403.03945",
    )

    @property
    @abstractmethod
    def turns(self) -> int:
        """How often `_columns` tells of its progress, at most."""

    @abstractmethod
    def _columns(
        self, mixture: Mixture, layer: Layer, rng: torch.Generator, tell: Callable[[int], None]
    ) -> tuple[list[Tensor], Tensor]:
        """Columns that are certain, `rank` each, and estimates of the others, `rank rest`.

        Args:
            tell: is told after each turn how many columns are certain.
        """

    def _layer(self, transcript: Transcript, knowledge: Knowledge, victim: int) -> Layer:
        """The first layer of the one update that is attacked."""
        return read_layer(self, single_update(transcript, victim), knowledge)

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        layer = self._layer(transcript, knowledge, victim)
        where = f"{self.called} on {layer.scene.where}"
        mixture = Mixture.of(layer.weight, layer.bias, layer.scene.num_examples, layer.scene.where)
        if mixture.rank < layer.scene.num_examples:
            log.warning(
                "%s: the update spans %d inputs, N is %d; examples that are equal, nearly equal or fire no unit cannot "
                "be told apart, so none is certified",
                where,
                mixture.rank,
                layer.scene.num_examples,
            )
        steps = iter(range(1, self.turns + 1))

        def tell(found: int) -> None:
            progress(next(steps), self.turns + 1, {"objective": 1 - found / mixture.rank})

        only = torch.ones(1, dtype=torch.float64)  # of a single input, which needs no unmixing
        found, rest = ([only], only[None, :0]) if mixture.rank == 1 else self._columns(mixture, layer, rng, tell)
        progress(self.turns + 1, self.turns + 1, {"objective": 1 - len(found) / mixture.rank})
        if complete := not rest.shape[1]:
            found = repaired(mixture, layer, found)
        columns = mixture.scaled(torch.cat([*(column[:, None] for column in found), rest], 1))
        inputs = mixture.unmixed(columns)
        sure = certified(mixture, layer, columns) if complete else torch.zeros(len(inputs), dtype=torch.bool)
        if found and not complete:
            inputs = torch.cat([cleaned(layer, inputs, len(found)), inputs[len(found) :]])
        return finding_of(layer, inputs, sure)


def finding_of(layer: Layer, inputs: Tensor, sure: Tensor | None = None) -> Reconstruction:
    """The claim that the client trained on `inputs`, `example input`, some of which are certified to be exact."""
    data, labels = layer.to_unit_range(inputs), labels_of(layer, layer.clamped(inputs))
    return Reconstruction(data=data, labels=labels, certified=sure)
