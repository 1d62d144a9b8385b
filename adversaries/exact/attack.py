"""Base of the attacks on a first linear layer: from columns of the mixture to a finding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.exact.consistency import certify_inputs, repair_columns, subtract_unknown_inputs
from adversaries.exact.layer import (
    FirstLayer,
    check_first_layer,
    check_first_layer_is_sent,
    read_first_layer,
    read_labels,
)
from adversaries.exact.mixture import InputMixture
from fedsim.base.papers import cite
from fedsim.interfaces.attack import ALL, Attack, Knowledge, Paper, Progress, Target, warn
from fedsim.interfaces.findings import Finding, Reconstruction
from fedsim.recording.wire_format import Update


@dataclass(frozen=True, kw_only=True)
class FirstLayerAttack(Attack):
    """Base of the attacks that read a client's inputs off the first linear layer's update.

    1. Read the layer's update (`_layer`) and factor it as a mixture of inputs (`InputMixture`).
    2. Find columns of the mixture, which a subclass does (`_columns`).
    3. If all are found, replace sums of several (`repair_columns`).
    4. Solve for the inputs, and certify those that are exact (`certify_inputs`).

    The attacks need no labels, number of steps, batch size or learning rate, and read one update of
    any number of steps of SGD, with momentum, weight decay, clipping or a proximal term; Adam and
    noise leave the span of the inputs. N need only be an upper bound, up to what the layer can tell
    apart, but nothing is certified then. Weights and biases of the layer must have one learning
    rate. Examples must enter the model unchanged; of an example that is augmented and seen once,
    the augmented version is recovered.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    uses: ClassVar[frozenset[str]] = frozenset({"private_parts"})
    paper: ClassVar[Paper] = cite("Dimitrov2024")
    vector_targets: ClassVar[bool] = True

    @property
    @abstractmethod
    def progress_steps(self) -> int:
        """Return the largest number of times that `_columns` reports its progress."""

    @abstractmethod
    def _columns(
        self, mixture: InputMixture, layer: FirstLayer, rng: torch.Generator, tell: Callable[[int], None]
    ) -> tuple[list[Tensor], Tensor]:
        """Return columns that are certain, `rank` each, and estimates of the others, `rank rest`.

        Args:
            tell: called after each step with the number of columns that are certain.
        """

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse a network without a first linear layer that it reads, and more examples than that distinguishes."""
        check_first_layer(knowledge, num_examples, stacked=self.rounds_needed == ALL)

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse messages without that layer."""
        check_first_layer_is_sent(update, knowledge)

    def _layer(self, target: Target) -> FirstLayer:
        """Return the first layer of the update that is attacked."""
        return read_first_layer(target.read_update(), target.knowledge)

    def _run(self, target: Target, progress: Progress) -> Finding:
        layer = self._layer(target)
        where = f"{self.title} on {layer.problem.where}"
        mixture = InputMixture.from_update(layer.weight, layer.bias, layer.problem.num_examples, layer.problem.where)
        if mixture.rank < layer.problem.num_examples:
            warn(
                f"{where}: the update spans {mixture.rank} inputs, N is {layer.problem.num_examples}; examples that "
                "are equal, nearly equal or fire no unit cannot be distinguished, so none is certified"
            )
        total_steps = self.progress_steps + 1
        step_numbers = iter(range(1, total_steps))

        def report(count: int) -> None:
            progress(next(step_numbers), total_steps, {"objective": 1 - count / mixture.rank})

        # Find columns.
        if mixture.rank == 1:  # a single input needs no unmixing
            certain = [torch.ones(1, dtype=torch.float64)]
            estimates = certain[0][None, :0]
        else:
            certain, estimates = self._columns(mixture, layer, target.rng, report)
        progress(total_steps, total_steps, {"objective": 1 - len(certain) / mixture.rank})
        complete = not estimates.shape[1]
        if complete:
            certain = repair_columns(mixture, layer, certain)
        # Solve for the inputs.
        single_columns = [column[:, None] for column in certain]
        columns = mixture.scale_columns(torch.cat([*single_columns, estimates], 1))
        inputs = mixture.unmix_inputs(columns)
        is_certified = torch.zeros(len(inputs), dtype=torch.bool)
        if complete:
            is_certified = certify_inputs(mixture, layer, columns)
        elif certain:
            count = len(certain)
            inputs = torch.cat([subtract_unknown_inputs(layer, inputs, count), inputs[count:]])
        return build_finding(layer, inputs, is_certified)


def build_finding(layer: FirstLayer, inputs: Tensor, is_certified: Tensor | None = None) -> Reconstruction:
    """Build the claim that the client trained on `inputs`.

    Args:
        inputs: `example input`, in the model's range.
        is_certified: `example`, which inputs are exact for sure.
    """
    data, labels = layer.to_unit_range(inputs), read_labels(layer, layer.clamp_inputs(inputs))
    return Reconstruction(data=data, labels=labels, certified=is_certified)
