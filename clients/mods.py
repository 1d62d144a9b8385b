"""A defense as a Flower mod: put it in front of any ClientApp's train function."""

from __future__ import annotations

import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedsim.defense import Defense


def as_mod(defense: Defense, rng: torch.Generator | None = None) -> Mod:
    """A mod that applies `defense.on_update` to what the client is about to send.

        app = ClientApp(mods=[as_mod(GaussianNoise(clip=1.0, noise_multiplier=0.1))])

    The hooks on batches and gradients act inside local training and need fedsim's own ClientApp.

    Args:
        rng: source of the defense's randomness; None draws a fresh seed from the operating system.
    """
    source = rng or torch.Generator()
    if rng is None:
        source.seed()

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        sent = next(iter(message.content.array_records.values()), None)
        before = {} if sent is None else {name: torch.from_numpy(a.numpy()) for name, a in sent.items()}
        reply = call_next(message, context)
        if reply.has_error() or message.metadata.message_type.split(".")[0] != "train":
            return reply
        for key, record in reply.content.array_records.items():
            after = {name: torch.from_numpy(array.numpy()) for name, array in record.items()}
            update = {n: t - before[n] for n, t in after.items() if n in before and t.is_floating_point()}
            defended = defense.on_update(update, rng=source)
            after |= {name: before[name] + value for name, value in defended.items()}
            reply.content[key] = ArrayRecord({name: Array(tensor.numpy()) for name, tensor in after.items()})
        return reply

    return mod
