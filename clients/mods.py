"""A defense as a Flower mod: put it in front of any ClientApp's train function."""

from __future__ import annotations

import torch
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedsim.defense import Defense
from fedsim.engines.arrays import record_of, state_in
from fedsim.errors import RunError
from fedsim.messages import State, as_received, as_sent, non_finite


def as_mod(defense: Defense, rng: torch.Generator | None = None) -> Mod:
    """A mod that applies `defense.on_update` to what the client is about to send.

        app = ClientApp(mods=[as_mod(GaussianNoise(clip=1.0, noise_multiplier=0.1))])

    The hooks on batches and gradients act inside local training and need fedsim's own ClientApp.
    What `on_update` hands back untouched is sent untouched, to the bit. A reply is refused, and so
    becomes an error of this client, if an array in it was never broadcast and so cannot be defended,
    or if the defended update is NaN or infinite.

    Args:
        rng: source of the defense's randomness; None draws a fresh seed from the operating system.
    """
    source = rng or torch.Generator()
    if rng is None:
        source.seed()

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        sent = next(iter(message.content.array_records.values()), None)
        before = {} if sent is None else state_in(sent)
        reply = call_next(message, context)
        if reply.has_error() or message.metadata.message_type.split(".")[0] != "train":
            return reply
        for key, record in reply.content.array_records.items():
            reply.content[key] = record_of(defended(defense, before, state_in(record), source))
        return reply

    return mod


def defended(defense: Defense, before: State, after: State, rng: torch.Generator) -> State:
    """What a client sends instead of `after`, having received `before`.

    Gradients in `after` are what the defense acts on as they are; of all else it acts on the difference to `before`.

    Raises:
        RunError: a tensor in `after` was not in `before` or is there twice, or the defended update is NaN or infinite.
    """
    gradient, rest = as_received(after)
    gradient = gradient or {}
    floats = {name: tensor for name, tensor in rest.items() if tensor.is_floating_point()}
    for name in (*floats, *gradient):
        if name in floats and name in gradient:
            raise RunError(
                f"{type(defense).__name__}: '{name}' is sent both as weights and as a gradient; send one of them"
            )
        if name not in before:
            raise RunError(
                f"{type(defense).__name__}: '{name}' was not broadcast, so its update cannot be defended; "
                "broadcast it with the model, or do not send it"
            )
    update = {name: tensor - before[name] for name, tensor in floats.items()} | dict(gradient)
    sent = defense.on_update(update, rng=rng)
    if broken := non_finite(sent):
        raise RunError(f"{type(defense).__name__}: the update of '{broken[0]}' is NaN or infinite")
    changed = {name: value for name, value in sent.items() if value is not update[name]}
    weights = {name: before[name] + value for name, value in changed.items() if name in floats}
    return {**after, **weights, **as_sent({name: changed[name] for name in gradient if name in changed}, {})}
