"""Simulated clients send what real ones would: alone, in a sum, with defenses that remember or agree on something."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adversaries.simulated import SimulatedClients
from clients.defenses.random_mask import RandomMask
from clients.defenses.update_noise import UpdateNoise
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.knowledge import Knowledge
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.wire_format import State, Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from tests.support.digit_clients import PLAN, data, knowledge, make_update, mlp

EPOCHS, MEMBERS = 2, (0, 1)


def simulate(facts: Knowledge, members: tuple[int, ...] = (), inputs: Tensor | None = None) -> Tensor:
    """Return what is simulated with the records of all members, of whom B is the total."""
    of_members = [data(member) for member in members or (0,)]
    labels = torch.cat([labels for _, labels in of_members])
    inputs = torch.cat([inputs for inputs, _ in of_members]) if inputs is None else inputs
    template: Update = replace(make_update(0), members=members, num_examples=len(labels))
    facts = replace(facts, labels=None, batch_size=len(labels), local_epochs=EPOCHS)
    return SimulatedClients(facts).simulate_update(template, inputs, labels, ("simulated",))


def test_a_simulated_sum_is_the_mean_of_what_each_client_sends() -> None:
    """Each takes its steps by itself, so that after the first one they differ."""
    before, messages = copy_state(mlp()), []
    for member in MEMBERS:
        after, _ = local_update(mlp(), before, *data(member), replace(PLAN, local_epochs=EPOCHS), key=(member,))
        messages.append(torch.cat([(before[name] - after[name]).flatten() for name in before]))
    mean = torch.stack(messages).mean(0)
    assert torch.allclose(simulate(knowledge(0), MEMBERS), mean, atol=1e-7)


def test_clients_of_a_simulated_sum_add_noise_of_their_own() -> None:
    noise = UpdateNoise(clip=1e-6, noise_multiplier=1e4)
    alone, of_four = simulate(knowledge(0, noise)), simulate(knowledge(0, noise), (0, 1, 2, 3))
    assert 1.9 < (alone.std() / of_four.std()).item() < 2.1


def test_clients_of_a_simulated_sum_agree_on_what_they_draw_in_common() -> None:
    plain, shares = simulate(knowledge(0), MEMBERS), []
    for common in (True, False):
        masked = simulate(knowledge(0, RandomMask(masked=0.5, common=common)), MEMBERS)
        shares.append((masked[plain != 0] == 0).double().mean().item())
    # Each of two masks leaves out half, and so by chance both a quarter.
    assert 0.47 < shares[0] < 0.53
    assert shares[1] < 0.4


@dataclass(frozen=True, kw_only=True)
class Remembering(Defense):
    """Send as many times w_t as it saw gradients in this round."""

    def on_gradient(self, gradient: State, context: LocalContext) -> State:
        context.memory["steps"] = context.memory.get("steps", torch.zeros(())) + 1
        return gradient

    def on_update(self, update: State, context: LocalContext) -> State:
        return {name: context.memory["steps"] * context.broadcast[name] for name in update}


def test_a_simulated_client_remembers_and_has_what_the_server_sent() -> None:
    broadcast = torch.cat([tensor.flatten() for tensor in copy_state(mlp()).values()])
    assert torch.equal(simulate(knowledge(0, Remembering())), -EPOCHS * broadcast)
    # It remembers nothing of the client that was simulated before.
    assert torch.equal(simulate(knowledge(0, Remembering()), MEMBERS), -EPOCHS * broadcast)
