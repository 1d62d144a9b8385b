"""Label distribution inference by counting the labels of each of a client's messages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy

from adversaries.inference.label_distribution import check_output_layer, infer_label_distribution
from fedsim.base.loss_term import prediction_loss
from fedsim.base.papers import cite
from fedsim.interfaces.attack import ALL, Attack, Knowledge, Paper, Progress, RoundsNeeded, Target
from fedsim.interfaces.findings import LabelDistribution
from fedsim.inversion.labels.last_layer import last_bias_name, untrained_layer_error
from fedsim.inversion.labels.updates import count_labels
from fedsim.inversion.model_checks import random_inputs
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS, warn_unless_plain_sgd
from fedsim.recording.wire_format import Update


@dataclass(frozen=True, kw_only=True)
class LabelCounts(Attack):
    """Claim the shares of classes that are counted from the last layer's bias in each message.

    Attacks on gradients count labels in the same way where these are withheld, see `count_labels`.
    The counts are exact except for the model's confidences, which are estimated from noise or from
    simulated training; the server needs no data.

    References:
        [Dimitrov2022]. Differs: see `count_labels`; the counts of several rounds are averaged.
    """

    paper: ClassVar[Paper] = cite("Dimitrov2022")
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range"})
    uses: ClassVar[frozenset[str]] = OPTIMIZER_FACTS | {"learning_rate", "local_epochs", "batch_size", "defenses"}
    rounds_needed: ClassVar[RoundsNeeded] = ALL

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse a network that does not end in a layer by which labels are counted."""
        check_output_layer(knowledge, reads_bias=True)

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse a network of which a part stays with the clients."""
        build_problem(update, knowledge)

    def _run(self, target: Target, progress: Progress) -> LabelDistribution:
        knowledge = target.knowledge
        warn_unless_plain_sgd(self, knowledge, f"client {target.victim}", simulated={"momentum"})

        def count_classes(update: Update) -> Tensor:
            problem = build_problem(update, knowledge)
            buffers = dict(problem.buffers)
            before = dict(zip(problem.parameter_names, problem.before, strict=True)) | buffers
            # Beside a gradient there are no returned weights.
            after = dict(zip(problem.parameter_names, problem.after or problem.before, strict=True)) | buffers
            bias = last_bias_name(problem.model, random_inputs(knowledge, problem.before[0]))
            if bias not in problem.parameter_names or not problem.direction[problem.parameter_names.index(bias)].any():
                raise untrained_layer_error("the bias")
            labels = count_labels(update, knowledge, problem.model, before, after, target.rng)
            return labels.bincount(minlength=len(problem.model.get_parameter(bias)))

        # Where the loss itself smooths labels, `count_labels` has removed the smoothing already.
        smoothing = knowledge.label_smoothing if prediction_loss(knowledge.loss) is cross_entropy else None
        return infer_label_distribution(target, count_classes, progress, smoothing=smoothing)
