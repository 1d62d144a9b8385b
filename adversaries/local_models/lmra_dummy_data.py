"""Local-model reconstruction by training on dummy data that reproduce the client's updates."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.func import functional_call

from adversaries.loadable_network import LoadableNetwork, match_state
from adversaries.local_models.input_span import InputSpan, row_span
from fedsim.base.constraints import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt, PositiveShare
from fedsim.base.errors import AttackError, RunError, first_line
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import ALL, CLIENT, Attack, Knowledge, MessageKind, Paper, Progress, RoundsNeeded, Target
from fedsim.interfaces.findings import LocalModel
from fedsim.inversion.batch_norm import copy_with_batch_statistics
from fedsim.inversion.descent import Curves, Trial, descend, divergence_error, make_optimizer_step, offset_progress
from fedsim.inversion.local_updates import PAPER, LocalUpdates, read_updates
from fedsim.inversion.recipe import cosine_schedule
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS, warn_of_dropout, warn_unless_plain_sgd
from fedsim.recording.wire_format import Update, match_names
from fedsim.training.first_layer import find_first_layer
from fedsim.training.local_optimum import train_to_convergence
from fedsim.training.model_state import load_state
from fedsim.training.optimizers import Adam

log = logging.getLogger("fedsim." + __name__)

_MAX_EXAMPLES = 128
_LENGTH_FACTOR_STEP_SIZE = 0.05
_COSINE_TOLERANCE = 0.01  # rounding of a cosine with updates that are small relative to the weights


@dataclass(frozen=True, kw_only=True)
class DummyDataReconstruction(Attack):
    """Reconstruct a client's optimal local model by training on dummy data made from its messages.

    1. Find dummy data and labels whose gradient at each broadcast model has the direction of the
       client's update theta_t - theta_c,t: minimise 1 - cosine, over a few messages at a time, with
       Adam (`_match`).
    2. Train the earliest broadcast model on them to convergence (`_train`).
    3. Repeat with several random starts and average the models, because their errors are partly
       independent.
    4. Claim a point between that mean and the model that the client returned last (`mix`): their
       errors differ, so that a point between them can be nearer to the truth than either.

    In terms of LMRA's Algorithm 2, the mapping G is the gradient of the clients' loss on learnt
    data (Eq. 7), and training on them minimises it (Eq. 8). A mapping of that form generalises far
    from the observed models, where a free network is arbitrary; the dummy data themselves do not
    resemble the client's data. Labels are soft at first and sharpened, because a client trains on
    hard labels.

    The targets of a regression have no natural scale, as probabilities have, and a cosine hardly
    depends on it. In a regression the updates' norms are matched too, up to one factor shared by
    all messages, the client's step length.

    If the network's first layer is linear and takes the inputs themselves, the messages determine
    the linear span of its inputs exactly (`adversaries.local_models.input_span`). Then dummy data
    are optimised within it, by their coordinates, and the returned model's first layer is projected
    on the earliest broadcast one plus that span, which local training would never leave. Otherwise
    (convolutions, BatchNorm before the layer), if the span is all inputs, or if updates are no
    combinations of inputs (noise), dummy data are unconstrained and the returned model is used as
    it is. The same holds with weight decay, which moves weights in other directions too. Inspected
    rounds should begin with the federation's first: the effect of earlier rounds on the first model
    cannot be removed.

    The claim may be nearer to the optimum than any model that was sent, and yet fit the client's
    data less well than the model that it returned. docs/studies/paper-numbers.md has figures.

    Defaults: `sets`, and that in coordinates the step is scaled while `spread` is not, were chosen
    by the distance to the true optimum of two clients of AT&T, seed 1; `mix` in earlier runs on few
    clients, and it was the best there again; `length_weight` on the six clients of flights, seed 1,
    among 0.03, 0.1, 0.3 and 1. The messages alone hardly indicate good values.

    Args:
        examples: number of dummy examples. None takes as many as the client reported, at most 128.
        sets: number of sets of dummy data, each from its own random start.
        iterations: matching steps for each set.
        messages: number of random messages matched in one step; the first message is among them in
            every other step.
        spread: standard deviation of the initial coordinates of dummy data, in the model's input
            units; coordinates on which the messages do not depend stay that small.
        step_size: of Adam for the dummy data, in the model's input units; in coordinates of r of n
            dimensions it is sqrt(n / r) times as large, which moves data equally far in the root
            mean square.
        label_step_size: of Adam for the logits of dummy labels, or the targets of a regression.
        sharpness: final factor of the logits; it grows from 1.
        length_weight: in a regression, weight of the squared difference between the log ratio of
            update norm to gradient norm and the log of the shared factor.
        training_iterations: training steps on the dummy data.
        mix: share of the model trained on dummy data in the claim, in (0, 1]; the rest is the
            client's last-returned model, parameter by parameter.

    References:
        After [Driouich2022]. Differs: ours; needs to know the model and the loss, which the paper's
        adversary does too (Sect. 2.2).
    """

    examples: Annotated[int, Ge(2)] | None = None
    sets: PositiveInt = 4
    iterations: PositiveInt = 300
    messages: PositiveInt = 2
    spread: PositiveFloat = 1.0
    step_size: PositiveFloat = 0.1
    label_step_size: PositiveFloat = 0.1
    sharpness: Annotated[FiniteFloat, Ge(1)] = 10.0
    length_weight: NonNegativeFloat = 0.1
    training_iterations: PositiveInt = 300
    mix: PositiveShare = 0.2

    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape"})
    uses: ClassVar[frozenset[str]] = OPTIMIZER_FACTS
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    rounds_needed: ClassVar[RoundsNeeded] = ALL
    message_kind: ClassVar[MessageKind] = "weights"

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse clients that do not send the whole model."""
        LoadableNetwork(knowledge).load(update.before, update.name)

    def _run(self, target: Target, progress: Progress) -> LocalModel:
        knowledge, rng = target.knowledge, target.rng
        updates = read_updates(target)
        if torch.equal(updates.before, updates.after):
            raise AttackError(f"{updates.location}: the client returned every model unchanged; choose another victim")
        warn_unless_plain_sgd(self, knowledge, updates.location)
        client = _Client(updates, knowledge)
        warn_of_dropout(self, client.model, knowledge, updates.location)
        client.probe(torch.randn((self._num_examples(updates), *(knowledge.input_shape or ())), generator=rng))

        # Find sets of dummy data and train a model on each.
        models: list[Tensor] = []
        objectives: list[Tensor] = []
        training_losses: list[Tensor] = []
        for _ in range(self.sets):
            set_progress = offset_progress(progress, len(models) * self._steps_per_set, self.sets * self._steps_per_set)
            dummy, labels = self._draw_dummy_data(client, rng)
            objectives.append(self._match(client, dummy, labels, rng, set_progress))
            model, losses = self._train(client, dummy, labels)
            set_progress(self._steps_per_set, self._steps_per_set, {"objective": losses[-1]})
            models.append(model)
            training_losses.append(torch.tensor(losses))

        claim = torch.lerp(client.isolate_returned_model(), torch.stack(models).mean(0), self.mix)
        trace = {
            "objective": torch.stack(objectives).mean(0),
            "training_loss": torch.stack(training_losses).mean(0),
        }
        return LocalModel(state=updates.to_state(claim), trace=trace)

    @property
    def _steps_per_set(self) -> int:
        return self.iterations + self.training_iterations

    def _num_examples(self, updates: LocalUpdates) -> int:
        return self.examples or min(max(2, updates.last_update.num_examples), _MAX_EXAMPLES)

    def _draw_dummy_data(self, client: _Client, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw initial coordinates of dummy data, and label logits or targets."""
        dummy = self.spread * torch.randn(client.coordinate_shape, generator=rng).to(client.example)
        labels = torch.randn(client.outputs.shape, generator=rng).to(client.outputs)
        return dummy, labels * 0.1 if client.classifies else labels

    def _train(self, client: _Client, dummy: Tensor, labels: Tensor) -> tuple[Tensor, list[float]]:
        """Train the earliest broadcast model on dummy data; return it and its loss by step."""
        try:
            model, losses = train_to_convergence(
                client.model,
                client.inputs(dummy),
                client.labels(labels, self.sharpness),
                client.loss,
                iterations=self.training_iterations,
            )
        except RunError as error:
            raise AttackError(f"{client.where}: {error}") from error
        return client.flatten_model(model), losses

    def _match(
        self,
        client: _Client,
        dummy: Tensor,
        labels: Tensor,
        rng: torch.Generator,
        progress: Progress,
    ) -> Tensor:
        """Optimise dummy data and labels in place; return the objective by step."""
        length_weight = 0.0 if client.classifies else self.length_weight
        messages, first_layer = client.changed_messages, client.first_layer
        _, log_ratio = client.distance(messages[0], client.model_inputs(dummy), client.labels(labels, 1.0), first_layer)
        log_factor = log_ratio.detach()
        optimizer = Adam(
            [
                {"params": [dummy.requires_grad_()]},
                {"params": [labels.requires_grad_()], "lr": self.label_step_size},
                {"params": [log_factor.requires_grad_()], "lr": _LENGTH_FACTOR_STEP_SIZE},
            ],
            self.step_size * client.step_scale,
        )

        def set_gradients(step: int) -> Curves:
            sharpness = self.sharpness ** (step / self.iterations)

            # Draw messages, in every other step with the first one among them.
            drawn = torch.randint(len(messages), (self.messages,), generator=rng).tolist()
            if step % 2 == 0:
                drawn[0] = 0

            # Add up the gradient at the model's inputs, then propagate it once to the coordinates.
            optimizer.zero_grad()
            total = 0.0
            inputs = client.model_inputs(dummy)
            detached_inputs = inputs.detach().requires_grad_()
            for index in drawn:
                distance, log_ratio = client.distance(
                    messages[index], detached_inputs, client.labels(labels, sharpness), first_layer
                )
                objective = (distance + length_weight * (log_ratio - log_factor).square()) / len(drawn)
                objective.backward()
                total += objective.item()
            inputs.backward(detached_inputs.grad)
            return {"objective": torch.tensor(total, dtype=torch.float64)}

        step = make_optimizer_step(optimizer, set_gradients, factor=lambda step: cosine_schedule(step, self.iterations))
        trial = Trial(step=step, point=dummy.detach)
        if not descend([trial], self.iterations, progress, where=client.where):
            raise divergence_error([trial], client.where, "step_size")
        dummy.requires_grad_(False)
        labels.requires_grad_(False)
        return trial.trace()["objective"]


class _Client:
    """The victim's messages, model and loss.

    Attributes:
        model: with the weights of the earliest broadcast; BatchNorm layers normalise by the batch.
        where: the client and the rounds, for errors.
        changed_messages: indices of the messages in which the client changed the model.
        example: `example ...`, any data with the shape of dummy data.
        outputs: `example output`, the model's outputs for them.
        span: the span of the client's inputs, None if it is unknown.
        first_layer: see `_first_layer_in_coordinates`.
    """

    def __init__(self, updates: LocalUpdates, knowledge: Knowledge) -> None:
        assert knowledge.model is not None
        assert knowledge.loss is not None
        model = copy.deepcopy(knowledge.model())
        load_state(model, match_state(model, updates.to_state(updates.before[0]), updates.location)[0])
        self.model: nn.Module = copy_with_batch_statistics(model).eval().to(knowledge.device)
        self.loss = knowledge.loss
        self.where = updates.location
        self.changed_messages = (updates.before != updates.after).any(1).nonzero().squeeze(1).tolist()
        self._updates = updates
        self._shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}

    def probe(self, example: Tensor) -> None:
        """Compute the outputs for data of this shape, and the span of the client's inputs."""
        self.example = example.to(next(self.model.parameters()))
        self.outputs = self._compute_outputs(self.example)
        self.span = self._find_span()
        self.first_layer = self._first_layer_in_coordinates(self.span) if self.span is not None else None

    def _first_layer_in_coordinates(self, span: InputSpan) -> tuple[Tensor, Tensor] | None:
        """Return the first layer's weights and updates for coordinates in place of inputs.

        Returns:
            Both `message output rank`; None if the model computes something else with them, because
            more than this layer uses the inputs or their shape.
        """
        before, after = self._first_layer_weights(span.weight)
        layer = (
            span.weight_in_coordinates(before.to(self.example)),
            span.weight_in_coordinates((before - after).to(self.example)),
        )
        rng = generator("coordinates")
        coordinates = torch.randn(self.coordinate_shape, generator=rng).to(self.example)
        labels = self.labels(torch.randn(self.outputs.shape, generator=rng).to(self.outputs), 1.0)
        for message in (self.changed_messages[0], self.changed_messages[-1]):
            expected, _ = self.distance(message, span.to_inputs(coordinates), labels)
            try:
                distance, _ = self.distance(message, coordinates, labels, layer)
            except Exception:  # the model need not take inputs of such a shape
                return None
            if not abs(distance - expected) < _COSINE_TOLERANCE:
                return None
        return layer

    def _find_span(self) -> InputSpan | None:
        layer = find_first_layer(self.model, self.example)
        if layer is None:
            return None
        before, after = self._first_layer_weights(layer.weight)
        basis = row_span(before, after, self._updates.last_update.num_examples)
        if basis is None:
            log.info("%s: all inputs are possible", self.where)
            return None
        log.info("%s: its inputs span %d of %d dimensions", self.where, *basis.shape)
        return InputSpan(weight=layer.weight, basis=basis.to(self.example.device), shape=tuple(self.example.shape[1:]))

    def _first_layer_weights(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the weight called `name` as broadcast and as returned, `message output input`."""
        before = torch.stack([self._name_parameters(row)[name] for row in self._updates.before])
        after = torch.stack([self._name_parameters(row)[name] for row in self._updates.after])
        return before, after

    @property
    def coordinate_shape(self) -> tuple[int, ...]:
        """Return the shape of the coordinates of dummy data, or of the data themselves."""
        return tuple(self.example.shape) if self.span is None else (len(self.example), len(self.span.basis))

    @property
    def step_scale(self) -> float:
        """Return the factor of step sizes in coordinates, see `InputSpan.step_scale`."""
        return 1.0 if self.span is None else self.span.step_scale

    @property
    def classifies(self) -> bool:
        """Return whether the model has several outputs; one output is a regression."""
        return self.outputs.shape[1] > 1

    def inputs(self, coordinates: Tensor) -> Tensor:
        """Return the dummy data with these coordinates."""
        return coordinates if self.span is None else self.span.to_inputs(coordinates)

    def model_inputs(self, coordinates: Tensor) -> Tensor:
        """Return what `distance` takes: coordinates if possible, otherwise inputs."""
        return coordinates if self.first_layer is not None else self.inputs(coordinates)

    def isolate_returned_model(self) -> Tensor:
        """Return the last returned model, without other clients' effect on the first layer.

        Returns:
            `parameter`.
        """
        vector = self._updates.after[-1].clone()
        if self.span is not None:
            weight = self._name_parameters(vector)[self.span.weight]
            first_broadcast = self._name_parameters(self._updates.before[0])[self.span.weight]
            weight.copy_(self.span.project(weight, first_broadcast))
        return vector

    def _name_parameters(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of one row of the messages under the names of the model."""
        parameters = match_names(self._updates.to_named_tensors(vector), self._shapes)
        if parameters is None:
            raise AttackError(f"{self.where}: the messages are of another architecture than the model; check the model")
        return dict(parameters)

    def _parameters_on_device(self, vector: Tensor) -> dict[str, Tensor]:
        like = next(self.model.parameters())
        return {name: tensor.to(like) for name, tensor in self._name_parameters(vector).items()}

    def _compute_outputs(self, dummy: Tensor) -> Tensor:
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
        """Return what the loss takes: sharpened probabilities, or targets in a regression."""
        return (values * sharpness).softmax(1) if self.classifies else values.squeeze(1)

    def distance(
        self, message: int, dummy: Tensor, labels: Tensor, first_layer: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compare theta_t - theta_c,t of one message with the loss gradient at theta_t.

        Args:
            dummy: inputs, or coordinates if `first_layer` is given. The result is the same, because
                both vectors lie in the span up to rounding, and its basis is orthonormal.
            labels: as `labels` returns them.
            first_layer: the first layer in coordinates.

        Returns:
            One minus the cosine, and the logarithm of update norm over gradient norm.
        """
        weights = self._parameters_on_device(self._updates.before[message])
        update = self._parameters_on_device(-self._updates.compute_deltas(message))
        if first_layer is not None:
            assert self.span is not None
            layer_weights, layer_updates = first_layer
            weights[self.span.weight] = layer_weights[message]
            update[self.span.weight] = layer_updates[message]
        weights = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
        loss = self.loss(functional_call(self.model, weights, (dummy,)), labels)
        gradient = torch.autograd.grad(loss, list(weights.values()), create_graph=True, materialize_grads=True)

        product = torch.stack([(g * u).sum() for g, u in zip(gradient, update.values(), strict=True)]).sum()
        tiny = torch.finfo(product.dtype).tiny
        gradient_norm = torch.stack([g.square().sum() for g in gradient]).sum().clamp_min(tiny).sqrt()
        update_norm = torch.stack([u.square().sum() for u in update.values()]).sum().clamp_min(tiny).sqrt()
        cosine = product / (gradient_norm * update_norm).clamp_min(tiny)
        return 1 - cosine, (update_norm / gradient_norm).log()

    def flatten_model(self, model: nn.Module) -> Tensor:
        """Return the model's parameters as `parameter`, others as the client returned them last."""
        vector = self._updates.after[-1].clone()
        views = self._name_parameters(vector)
        for name, parameter in model.named_parameters():
            views[name].copy_(parameter.detach())
        return vector
