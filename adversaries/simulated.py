"""Simulated clients, which train the broadcast model on the adversary's own records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, cast, get_args, get_type_hints

import torch
from torch import Tensor, nn

from adversaries.loadable_network import LoadableNetwork
from fedsim.base.errors import AttackError, RunError
from fedsim.base.task import Loss
from fedsim.interfaces.attack import Knowledge
from fedsim.interfaces.defense import Defense, Participation, overrides, pair_with_keys
from fedsim.interfaces.defense_calls import apply_on_update
from fedsim.interfaces.local_context import ClientRound, DefenseKey, LocalContext, Memory
from fedsim.inversion.batch_norm import used_batch_statistics
from fedsim.inversion.named_states import named_states
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State, Update
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.model_state import copy_state
from fedsim.training.settings import LocalTraining

_OPTIMIZERS = get_args(get_type_hints(LocalTraining)["optimizer"])
_FEW_ROUNDS, _MANY_ROUNDS = 1, 1000
"""Numbers of rounds for which a simulated defense must be equally strong; theirs is unknown."""


def training_plan(knowledge: Knowledge, num_examples: int, *, label_smoothing: float = 0.0) -> LocalTraining:
    """Return how a client with `num_examples` examples trains; unknown settings are plain SGD's."""
    if (optimizer := knowledge.optimizer or "sgd") not in _OPTIMIZERS:
        raise AttackError(
            f"clients step with {optimizer}, and only training with {', '.join(_OPTIMIZERS)} is "
            "simulated; choose another attack"
        )
    return LocalTraining(
        local_epochs=knowledge.local_epochs if knowledge.local_steps is None else None,
        local_steps=knowledge.local_steps,
        batch_size=knowledge.batch_size or num_examples,
        learning_rate=knowledge.learning_rate or 0.0,
        optimizer=cast("Literal['sgd', 'adam', 'adamw']", optimizer),
        momentum=knowledge.momentum or 0.0,
        weight_decay=knowledge.weight_decay or 0.0,
        proximal_mu=knowledge.proximal_mu or 0.0,
        label_smoothing=label_smoothing,
    )


class SimulatedClients:
    """Updates that a victim would have sent with other records, and its own in the same form.

    Known defenses are simulated in training and on the update, each time with fresh randomness. A
    defense with state from earlier rounds starts anew.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge, self._network = knowledge, LoadableNetwork(knowledge)
        self._num_classes = knowledge.num_classes or 0
        self._value_range = _value_range_as_tuples(knowledge)
        self._defenses_by_moment: dict[tuple[int, int], list[Defense]] = {}

    def check_message(self, update: Update) -> None:
        """Raise AttackError where clients that send messages of the form of `update` are not simulated."""
        self.flatten_update(update)
        plan = self._client_plan(update, update.num_examples)
        self._configured_defenses(update.num_examples, plan, update.round, update.name)

    def flatten_update(self, update: Update) -> Tensor:
        """Return `parameter`, w_t - w_k, or the gradient that was sent."""
        where = update.name
        model = self._network.load(update.before, where)
        states = named_states(update, model, where)
        names = _trained_names(model)
        return torch.cat([states.direction(name, torch.float32).flatten() for name in names])

    def simulate_update(self, template: Update, inputs: Tensor, labels: Tensor, key: tuple[int | str, ...]) -> Tensor:
        """Train a client on these records; return its update in the form of `flatten_update`.

        Where the template is a sum over clients, each of them trains on a part of the records, all
        of about the same size, and what is returned is their mean, weighted by N.

        Args:
            template: gives the round, the broadcast model and the kind of message.
            inputs: `example ...`, in the model's range.
            labels: `example`.
            key: of all that is random.
        """
        count = min(len(template.members), len(inputs))
        if count < 2:
            return self._simulate_client(template, inputs, labels, key, key)
        mean: Tensor | None = None
        for number, rows in enumerate(torch.arange(len(inputs)).tensor_split(count)):
            member_key = (*key, "member", number)
            message = self._simulate_client(template, inputs[rows], labels[rows], member_key, key)
            part = message * (len(rows) / len(inputs))
            mean = part if mean is None else mean + part
        assert mean is not None
        return mean

    def _simulate_client(
        self,
        template: Update,
        inputs: Tensor,
        labels: Tensor,
        key: tuple[int | str, ...],
        common_key: tuple[int | str, ...],
    ) -> Tensor:
        """Train one client; what all clients draw alike follows from `common_key`."""
        where = template.name
        knowledge = self._knowledge
        model = self._network.load(template.before, where)
        sends_gradient = template.gradient is not None
        plan = self._client_plan(template, len(inputs))
        plan = replace(plan, batch_norm="train" if used_batch_statistics(template, model) else "eval")
        defenses = self._configured_defenses(len(inputs), plan, template.round, where)
        before = copy_state(model)
        client_round = _first_round(template.round, before, key, common_key)
        train = local_gradient if sends_gradient else local_update
        try:
            # Train.
            trained, *_ = train(
                model,
                before,
                inputs.to(knowledge.device),
                labels.to(knowledge.device),
                plan,
                key=key,
                defenses=defenses,
                client_round=client_round,
                loss=cast("Loss", knowledge.loss),
            )
            update: State = trained
            if not sends_gradient:
                update = {name: tensor - before[name] for name, tensor in trained.items()}
            # Apply the defenses of the update.
            for defense, defense_key in pair_with_keys(defenses):
                context = client_round.make_context("on_update", defense_key, defense.draws_in_common)
                update = _defend_update(defense, update, context)
        except RunError as error:
            raise AttackError(
                f"{where}: a client that is simulated on auxiliary records failed ({error}); attack another round"
            ) from error
        sign = 1 if sends_gradient else -1
        names = _trained_names(model)
        return torch.cat([sign * update[name].float().flatten() for name in names])

    def _client_plan(self, template: Update, num_examples: int) -> LocalTraining:
        """Return how one client trains; in what is known of a sum over clients, B is their total."""
        knowledge = self._knowledge
        if len(template.members) > 1 and knowledge.batch_size:
            knowledge = replace(knowledge, batch_size=max(1, knowledge.batch_size // len(template.members)))
        return training_plan(knowledge, num_examples)

    def _configured_defenses(self, num_examples: int, plan: LocalTraining, number: int, where: str) -> list[Defense]:
        """Return the known defenses of a round as a client with `num_examples` examples configures them."""
        moment = num_examples, number
        if moment not in self._defenses_by_moment:
            configured = []
            for defense in self._knowledge.defenses_in(number):
                if overrides(defense, "on_data"):
                    raise AttackError(
                        f"{where}: {type(defense).__name__} chooses the data that take part, which "
                        "is not simulated; take the attack that does not know the defenses"
                    )
                few = defense.of_client(self._participation(num_examples, plan, _FEW_ROUNDS))
                many = defense.of_client(self._participation(num_examples, plan, _MANY_ROUNDS))
                if few != many:
                    raise AttackError(
                        f"{where}: the strength of {type(defense).__name__} follows from the number of rounds, which "
                        "this attack does not know; use the attack that does not know the defenses"
                    )
                configured.append(few)
            self._defenses_by_moment[moment] = configured
        return self._defenses_by_moment[moment]

    def _participation(self, num_examples: int, plan: LocalTraining, rounds: int) -> Participation:
        return Participation(
            num_examples=num_examples,
            batch_size=plan.batch_size,
            steps=plan.steps(num_examples),
            rounds=rounds,
            num_classes=self._num_classes,
            value_range=self._value_range,
        )


def _value_range_as_tuples(
    knowledge: Knowledge,
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    if knowledge.value_range is None:
        return None
    low, high = knowledge.value_range
    return tuple(low), tuple(high)


def _trained_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _first_round(
    number: int, broadcast: State, key: tuple[int | str, ...], common_key: tuple[int | str, ...]
) -> ClientRound:
    """Return the part in a round of a client that remembers nothing of earlier ones."""
    memories: dict[DefenseKey, Memory] = {}
    return ClientRound(
        key=key,
        number=number,
        broadcast=broadcast,
        read_memory=lambda defense_key: memories.setdefault(defense_key, {}),
        common_key=(*common_key, "common"),
    )


def _defend_update(defense: Defense, update: State, context: LocalContext) -> Mapping[str, Tensor]:
    """Return what `on_update` makes of an update, dense."""
    defended = apply_on_update(defense, update, context)
    return defended.values("delta", update) if isinstance(defended, Payload) else defended
