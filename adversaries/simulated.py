"""Simulated clients: they train on records of the adversary's own as a victim does, from the model that it was sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, cast, get_args, get_type_hints

import torch
from torch import Tensor, nn

from adversaries.batch_norm import trained_by_batch
from adversaries.local_models.model_sources import Network
from adversaries.named_states import named_states
from fedsim.attacks import Knowledge
from fedsim.defense import Defense, Memory, Participation, agrees, keyed, overrides, remembers, replaced_update
from fedsim.errors import AttackError, RunError
from fedsim.randomness import generator
from fedsim.task import Loss
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.model_state import state_of
from fedsim.training.settings import LocalTraining
from fedsim.wire.messages import State, Update
from fedsim.wire.payloads import Payload

_OPTIMIZERS = get_args(get_type_hints(LocalTraining)["optimizer"])
_FEW, _MANY = 1, 1000
"""Rounds of which a defense should be as strong, if it can be simulated by who does not know how many there are."""


def training_of(knowledge: Knowledge, count: int, *, label_smoothing: float = 0.0) -> LocalTraining:
    """How a client with `count` examples trains, as far as that is known; what is not known is that of plain SGD.

    Raises:
        AttackError: its optimizer is none that can be simulated.
    """
    if (optimizer := knowledge.optimizer or "sgd") not in _OPTIMIZERS:
        raise AttackError(
            f"clients step with {optimizer}, and only training with {', '.join(_OPTIMIZERS)} is simulated; choose "
            "another attack"
        )
    return LocalTraining(
        local_epochs=knowledge.local_epochs if knowledge.local_steps is None else None,
        local_steps=knowledge.local_steps,
        batch_size=knowledge.batch_size or count,
        learning_rate=knowledge.learning_rate or 0.0,
        optimizer=cast("Literal['sgd', 'adam', 'adamw']", optimizer),
        momentum=knowledge.momentum or 0.0,
        weight_decay=knowledge.weight_decay or 0.0,
        proximal_mu=knowledge.proximal_mu or 0.0,
        label_smoothing=label_smoothing,
    )


class SimulatedClients:
    """What a victim would have sent, had it held other records; and what it sent, in the same form.

    Of known defenses all is simulated that acts on training and on the update, each time with fresh randomness. A
    defense that remembers earlier rounds starts anew.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge, self._network = knowledge, Network(knowledge)
        self._classes, self._range = knowledge.num_classes or 0, _ends(knowledge)
        self._defenses: dict[int, list[Defense]] = {}

    def read(self, update: Update) -> Tensor:
        """`parameter`, w_t - w_k, or the gradient that was sent."""
        where = f"round {update.round}, client {update.client}"
        model = self._network.holding(update.before, where)
        states = named_states(update, model, where)
        return torch.cat([states.direction(name, torch.float32).flatten() for name in _trained(model)])

    def send(self, like: Update, inputs: Tensor, labels: Tensor, key: tuple[int | str, ...]) -> Tensor:
        """The same of a client that holds these records, in the round and with the model of `like`.

        Args:
            inputs: `example ...` in model units.
            labels: `example`.
            key: of all that is random.

        Raises:
            AttackError: training diverged, or a known defense cannot be simulated.
        """
        where, known = f"round {like.round}, client {like.client}", self._knowledge
        model = self._network.holding(like.before, where)
        gradient = like.gradient is not None
        plan = replace(training_of(known, len(inputs)), batch_norm="train" if trained_by_batch(like, model) else "eval")
        defenses, loss = self._defending(len(inputs), plan, where), cast("Loss", known.loss)
        before, sent = state_of(model), local_gradient if gradient else local_update
        try:
            found, *_ = sent(
                model,
                before,
                inputs.to(known.device),
                labels.to(known.device),
                plan,
                key=key,
                defenses=defenses,
                loss=loss,
            )
            moved: State = found if gradient else {name: tensor - before[name] for name, tensor in found.items()}
            for defense, own in keyed(defenses):
                moved = _defended(defense, moved, (*key, "defense", "on_update", *own))
        except RunError as error:
            raise AttackError(
                f"{where}: a client that is simulated on auxiliary records failed ({error}); attack another round"
            ) from error
        sign = 1 if gradient else -1
        return torch.cat([sign * moved[name].float().flatten() for name in _trained(model)])

    def _defending(self, count: int, plan: LocalTraining, where: str) -> list[Defense]:
        """The known defenses as a client with `count` examples uses them."""
        if count not in self._defenses:
            found = []
            for defense in self._knowledge.defenses or ():
                if overrides(defense, "on_data"):
                    raise AttackError(
                        f"{where}: {type(defense).__name__} chooses the data that take part, which is not simulated; "
                        "take the attack that does not know the defenses"
                    )
                few, many = (defense.of_client(self._part(count, plan, rounds)) for rounds in (_FEW, _MANY))
                if few != many:
                    raise AttackError(
                        f"{where}: the strength of {type(defense).__name__} follows from the number of rounds, which "
                        "this attack is not told; take the attack that does not know the defenses"
                    )
                found.append(few)
            self._defenses[count] = found
        return self._defenses[count]

    def _part(self, count: int, plan: LocalTraining, rounds: int) -> Participation:
        return Participation(
            num_examples=count,
            batch_size=plan.batch_size,
            steps=plan.steps(count),
            rounds=rounds,
            num_classes=self._classes,
            value_range=self._range,
        )


def _ends(knowledge: Knowledge) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    if knowledge.value_range is None:
        return None
    low, high = knowledge.value_range
    return tuple(low), tuple(high)


def _trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _defended(defense: Defense, moved: State, key: tuple[int | str, ...]) -> Mapping[str, Tensor]:
    """What `on_update` makes of an update, dense."""
    memory: Memory | None = {} if remembers(defense) else None
    common = generator(*key, "common") if agrees(defense) else None
    sent = replaced_update(defense, moved, generator(*key), memory, common)
    return sent.values("delta", moved) if isinstance(sent, Payload) else sent
