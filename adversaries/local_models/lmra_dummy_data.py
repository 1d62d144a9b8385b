"""A local model by training alone on dummy data that move models as the client does."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from adversaries.batch_norm import normalising_by_batch
from adversaries.engine.descent import Curves, Trial, descend, diverged, following, steps_of
from adversaries.engine.recipe import by_cosine
from adversaries.engine.settings import check_not_negative, check_positive
from adversaries.local_models.input_span import InputSpan, row_span
from adversaries.local_models.model_sources import matched
from adversaries.local_updates import PAPER, LocalUpdates, read_updates
from adversaries.scene import STEPPING, warn_of_dropout, warn_unless_plain
from fedsim.attacks import CLIENT, Attack, Knowledge, Paper, Progress
from fedsim.errors import AttackError, ConfigError, RunError, first_line
from fedsim.findings import Finding, LocalModel
from fedsim.randomness import generator
from fedsim.recording.transcript import Transcript
from fedsim.training.alone import train_alone
from fedsim.training.first_layer import first_layer
from fedsim.training.model_state import load_state
from fedsim.training.optimizers import Adam
from fedsim.wire.messages import by_name

log = logging.getLogger("fedsim." + __name__)

_MOST = 128
_FACTOR_STEP_SIZE = 0.05
_ROUNDING = 0.01  # of a cosine, with updates that are small beside the weights


@dataclass(frozen=True, kw_only=True)
class DummyDataReconstruction(Attack):
    """Reconstruct the model that a client would have trained alone, by training on dummy data made from its messages.

    First finds dummy data and labels whose gradient at each broadcast model points where the client's update
    theta_t - theta_c,t points: minimises one minus their cosine, over a few messages at a time, with Adam. Then trains
    the earliest broadcast model on them by gradient descent, as it would alone (`fedsim.training.alone`). That is done
    several times from random starts, and the models are averaged: their errors are partly their own.

    In terms of LMRA's Algorithm 2, the mapping G is the gradient of the clients' loss at data that are learnt (Eq. 7),
    and training on them minimises it (Eq. 8). A mapping of that form holds far from the models that were seen,
    where a free one is arbitrary; the dummy data themselves look like nothing. Labels are soft at first and sharpened,
    because a client trains on labels that are certain. The claim is a point between the model that it returned last and
    the mean, see `mix`: their errors differ, and a point between them can be nearer to the truth than either.

    The targets of a regression have no natural size, as probabilities have, and a cosine hardly depends on it. There
    the updates' lengths are matched too, up to one factor that all messages share: how far the client steps.

    Where the network's first layer is linear and takes the inputs themselves, the messages determine the linear span
    of its inputs exactly (`adversaries.local_models.input_span`). Then dummy data are sought within it, by their
    coordinates, and the returned model's first layer is projected on the earliest broadcast one plus that span, which
    training alone would never leave. Elsewhere (convolutions, BatchNorm before the layer), where the span is all
    inputs, and where updates are no combinations of inputs (noise), dummy data are free and the returned model is as
    it is. Weights that are decayed move in other directions too, and are not treated either. Inspection should begin
    with the federation: the effect of its earlier rounds on the first model cannot be removed.

    What it claims may be nearer to the optimum than any model that was sent, and yet fit the client's data less well
    than the model that it returned. docs/paper-numbers.md has figures.

    How the defaults were chosen: `sets`, and that in coordinates the step is stretched while `spread` is not, by the
    distance to the true optimum of two clients of AT&T, seed 1; `mix` in earlier runs on few clients, and it was the
    best there again; `length_weight` on the six clients of flights, seed 1, among 0.03, 0.1, 0.3 and 1. Messages
    hardly tell.

    Args:
        examples: how many dummy examples. None takes as many as the client reported, at most 128.
        sets: how many sets of dummy data are found, each from its own random start.
        iterations: steps of matching, of each set.
        messages: how many messages, drawn at random, are matched in one step; the first one is every other time.
        spread: standard deviation of the dummy data's coordinates at the start, in the units the model is fed with;
            coordinates on which the messages do not depend stay that small.
        step_size: of Adam for the dummy data, in the units the model is fed with; in coordinates of r of n dimensions
            it is sqrt(n / r) times as large, which moves data as far in the root mean square.
        label_step_size: of Adam for the logits of dummy labels, or the targets of a regression.
        sharpness: what the logits are multiplied by at the end; it grows from 1.
        length_weight: in a regression, of the squared difference between the logarithms of an update's length over that
            of the gradient and of the shared factor.
        training_iterations: steps of training alone.
        mix: share of the model trained on dummy data in what is claimed, in (0, 1]; the rest is the client's
            last-returned model, parameter by parameter.

    References:
        After Driouich et al.: Local Model Reconstruction Attacks in Federated Learning and their Uses, 2022. Differs:
        ours; needs to know the model and the loss, which the paper's adversary does too (Sect. 2.2).
    """

    examples: int | None = None
    sets: int = 4
    iterations: int = 300
    messages: int = 2
    spread: float = 1.0
    step_size: float = 0.1
    label_step_size: float = 0.1
    sharpness: float = 10.0
    length_weight: float = 0.1
    training_iterations: int = 300
    mix: float = 0.2

    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape"})
    uses: ClassVar[frozenset[str]] = STEPPING
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    temporal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("sets", "iterations", "messages", "training_iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.examples is not None and self.examples < 2:
            raise ConfigError(f"examples: expected at least 2, got {self.examples}")
        check_positive(self, "spread", "step_size", "label_step_size")
        check_not_negative(self, "length_weight")
        if not 0 < self.mix <= 1:
            raise ConfigError(f"mix: expected a share in (0, 1], got {self.mix}")
        if not 1 <= self.sharpness < math.inf:
            raise ConfigError(f"sharpness: expected a finite value of at least 1, got {self.sharpness}")

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        updates = read_updates(transcript, victim, fewest=1, remedy="record some")
        if torch.equal(updates.before, updates.after):
            raise AttackError(f"{updates.where}: the client returned every model unchanged; choose another victim")
        warn_unless_plain(self, knowledge, updates.where)
        client = _Client(updates, knowledge)
        warn_of_dropout(self, client.model, knowledge, updates.where)
        client.look(torch.randn((self._examples(updates), *(knowledge.input_shape or ())), generator=rng))
        trained: list[Tensor] = []
        curves: list[tuple[Tensor, Tensor]] = []
        for _ in range(self.sets):
            told = following(progress, len(trained) * self._steps, self.sets * self._steps)
            dummy, labels = self._start(client, rng)
            matching = self._match(client, dummy, labels, rng, told)
            model, losses = self._train(client, dummy, labels)
            told(self._steps, self._steps, {"objective": losses[-1]})
            trained.append(model)
            curves.append((matching, torch.tensor(losses)))
        found = torch.lerp(client.returned(), torch.stack(trained).mean(0), self.mix)
        objective, training_loss = (torch.stack(curve).mean(0) for curve in zip(*curves, strict=True))
        return LocalModel(state=updates.state(found), trace={"objective": objective, "training_loss": training_loss})

    @property
    def _steps(self) -> int:
        """Of one set of dummy data."""
        return self.iterations + self.training_iterations

    def _examples(self, updates: LocalUpdates) -> int:
        return self.examples or min(max(2, updates.last.num_examples), _MOST)

    def _start(self, client: _Client, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random coordinates of dummy data, and labels."""
        dummy = self.spread * torch.randn(client.coordinates, generator=rng).to(client.example)
        labels = torch.randn(client.outputs.shape, generator=rng).to(client.outputs)
        return dummy, labels * 0.1 if client.classifies else labels

    def _train(self, client: _Client, dummy: Tensor, labels: Tensor) -> tuple[Tensor, list[float]]:
        """The earliest broadcast model, trained on dummy data, and its loss by step."""
        try:
            model, losses = train_alone(
                client.model,
                client.inputs(dummy),
                client.labels(labels, self.sharpness),
                client.loss,
                iterations=self.training_iterations,
            )
        except RunError as error:
            raise AttackError(f"{client.where}: {error}") from error
        return client.vector(model), losses

    def _match(
        self,
        client: _Client,
        dummy: Tensor,
        labels: Tensor,
        rng: torch.Generator,
        progress: Progress,
    ) -> Tensor:
        """Move dummy data and labels until they move the models as the client does; returns the objective by step."""
        weight = 0.0 if client.classifies else self.length_weight
        _, longer = client.distance(client.moved[0], client.fed(dummy), client.labels(labels, 1.0), client.first)
        factor = longer.detach()
        optimizer = Adam(
            [{"params": [dummy.requires_grad_()]},
             {"params": [labels.requires_grad_()], "lr": self.label_step_size},
             {"params": [factor.requires_grad_()], "lr": _FACTOR_STEP_SIZE}],
            self.step_size * client.stretch,
        )  # fmt: skip

        def slopes(step: int) -> Curves:
            sharpness = self.sharpness ** (step / self.iterations)
            drawn = torch.randint(len(client.moved), (self.messages,), generator=rng).tolist()
            chosen = [client.moved[place] for place in [drawn[0] if step % 2 else 0, *drawn[1:]]]
            optimizer.zero_grad()
            total = 0.0
            made = client.fed(dummy)
            data = made.detach().requires_grad_()  # slopes of all messages are gathered here, then go on once
            for place in chosen:
                distance, longer = client.distance(place, data, client.labels(labels, sharpness), client.first)
                objective = (distance + weight * (longer - factor).square()) / len(chosen)
                objective.backward()  # type: ignore[no-untyped-call]
                total += objective.item()
            made.backward(data.grad)  # type: ignore[no-untyped-call]
            return {"objective": torch.tensor(total, dtype=torch.float64)}

        trial = Trial(
            step=steps_of(optimizer, slopes, factor=lambda step: by_cosine(step, self.iterations)), point=dummy.detach
        )
        if not descend([trial], self.iterations, progress, where=client.where):
            raise diverged([trial], client.where, "step_size")
        dummy.requires_grad_(False)
        labels.requires_grad_(False)
        return trial.trace()["objective"]


class _Client:
    """The victim's messages, with the model and the loss that it trains.

    Attributes:
        model: holds the earliest broadcast model; BatchNorm layers normalise by the batch.
        loss: what it minimises.
        where: begins an error.
        moved: places of the messages in which it moved the model.
        example: `example ...`, any data of the shape of dummy data.
        outputs: `example output` of them.
        span: what is known of its inputs, or None.
        first: see `_in_coordinates`.
    """

    def __init__(self, updates: LocalUpdates, knowledge: Knowledge) -> None:
        assert knowledge.model is not None
        assert knowledge.loss is not None
        model = copy.deepcopy(knowledge.model())
        load_state(model, matched(model, updates.state(updates.before[0]), updates.where)[0])
        self.model: nn.Module = normalising_by_batch(model).eval().to(knowledge.device)
        self.loss = knowledge.loss
        self.where = updates.where
        self.moved = (updates.before != updates.after).any(1).nonzero().squeeze(1).tolist()
        self._updates = updates
        self._shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}

    def look(self, example: Tensor) -> None:
        """Find the outputs of the model for such data, and the span of its inputs, from the messages.

        Raises:
            AttackError: the model does not take such data.
        """
        self.example = example.to(next(self.model.parameters()))
        self.outputs = self._outputs(self.example)
        self.span = self._span()
        self.first = self._in_coordinates(self.span) if self.span is not None else None

    def _in_coordinates(self, span: InputSpan) -> tuple[Tensor, Tensor] | None:
        """`message output rank`, the first layer as it was broadcast and as it moved, for a model fed with coordinates.

        None where that computes something else: where more than this layer sees the inputs, or asks for their shape.
        """
        before, after = self._first(span.weight)
        first = span.within(before.to(self.example)), span.within((before - after).to(self.example))
        rng = generator("coordinates")
        coordinates = torch.randn(self.coordinates, generator=rng).to(self.example)
        labels = self.labels(torch.randn(self.outputs.shape, generator=rng).to(self.outputs), 1.0)
        for place in (self.moved[0], self.moved[-1]):
            whole, _ = self.distance(place, span.inputs(coordinates), labels)
            try:
                own, _ = self.distance(place, coordinates, labels, first)
            except Exception:  # the model need not take inputs of such a shape
                return None
            if not abs(own - whole) < _ROUNDING:
                return None
        return first

    def _span(self) -> InputSpan | None:
        weight = first_layer(self.model, self.example)
        if weight is None:
            return None
        before, after = self._first(weight)
        basis = row_span(before, after, self._updates.last.num_examples)
        if basis is None:
            log.info("%s: all inputs are possible", self.where)
            return None
        log.info("%s: its inputs span %d of %d dimensions", self.where, *basis.shape)
        return InputSpan(weight=weight, basis=basis.to(self.example.device), shape=tuple(self.example.shape[1:]))

    def _first(self, weight: str) -> tuple[Tensor, Tensor]:
        """`message output input`, that weight as it was broadcast, and as it returned it."""
        before, after = (
            torch.stack([self._named(row)[weight] for row in rows])
            for rows in (self._updates.before, self._updates.after)
        )
        return before, after

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Shape of the unknowns that stand for dummy data."""
        return tuple(self.example.shape) if self.span is None else (len(self.example), len(self.span.basis))

    @property
    def stretch(self) -> float:
        """See `InputSpan.stretch`."""
        return 1.0 if self.span is None else self.span.stretch

    @property
    def classifies(self) -> bool:
        """Whether the model has several outputs, which stand for classes; a single one stands for a regression."""
        return self.outputs.shape[1] > 1

    def inputs(self, coordinates: Tensor) -> Tensor:
        """Dummy data."""
        return coordinates if self.span is None else self.span.inputs(coordinates)

    def fed(self, coordinates: Tensor) -> Tensor:
        """What `distance` takes: the coordinates themselves where possible, which are fewer numbers."""
        return coordinates if self.first is not None else self.inputs(coordinates)

    def returned(self) -> Tensor:
        """`parameter`, the last model that it returned, without what others' data added to its first layer."""
        found = self._updates.after[-1].clone()
        if self.span is not None:
            weight = self._named(found)[self.span.weight]
            weight.copy_(self.span.project(weight, self._named(self._updates.before[0])[self.span.weight]))
        return found

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of one row of the messages under the names of the model."""
        found = by_name(self._updates.named(vector), self._shapes)
        if found is None:
            raise AttackError(f"{self.where}: the messages are of another architecture than the model; check the model")
        return dict(found)

    def _at(self, vector: Tensor) -> dict[str, Tensor]:
        """The same, where the model computes."""
        return {name: tensor.to(next(self.model.parameters())) for name, tensor in self._named(vector).items()}

    def _outputs(self, dummy: Tensor) -> Tensor:
        """`example output`."""
        try:
            with torch.no_grad():
                outputs: Tensor = self.model(dummy)
        except (RuntimeError, ValueError, IndexError) as error:
            raise AttackError(
                f"the model does not take inputs of shape {tuple(dummy.shape)} ({first_line(error)}); check "
                "input_shape, and that the model takes numbers"
            ) from error
        return outputs

    def labels(self, values: Tensor, sharpness: float) -> Tensor:
        """What the loss takes: probabilities of logits, or targets where the model has one output."""
        return (values * sharpness).softmax(1) if self.classifies else values.squeeze(1)

    def distance(
        self, place: int, dummy: Tensor, labels: Tensor, first: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """One minus the cosine between theta_t - theta_c,t and the loss's gradient at theta_t, and log of their ratio.

        With `first`, the first layer in coordinates, dummy data are coordinates, too. That gives the same: both vectors
        lie in the span, but for rounding, and its basis is orthonormal.
        """
        weights = self._at(self._updates.before[place])
        moved = self._at(-self._updates.moves(place))
        if first is not None:
            assert self.span is not None
            weights[self.span.weight], moved[self.span.weight] = (rows[place] for rows in first)
        weights = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
        loss = self.loss(functional_call(self.model, weights, (dummy,)), labels)
        gradient = torch.autograd.grad(loss, list(weights.values()), create_graph=True, materialize_grads=True)
        pairs = list(zip(gradient, moved.values(), strict=True))
        product = torch.stack([(a * b).sum() for a, b in pairs]).sum()
        tiny = torch.finfo(product.dtype).tiny
        length, moves = (
            torch.stack([t.square().sum() for t in side]).sum().clamp_min(tiny).sqrt()
            for side in zip(*pairs, strict=True)
        )
        return 1 - product / (length * moves).clamp_min(tiny), (moves / length).log()

    def vector(self, model: nn.Module) -> Tensor:
        """`parameter` of such a model; tensors that it does not name are as the client returned them last."""
        found = self._updates.after[-1].clone()
        places = self._named(found)
        for name, parameter in model.named_parameters():
            places[name].copy_(parameter.detach())
        return found
