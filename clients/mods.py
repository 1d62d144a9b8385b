"""A defense as a Flower mod: put it in front of any ClientApp's train function."""

from __future__ import annotations

import torch
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedsim.defense import INSIDE, Defense, a_defense, kind, overrides, replaced
from fedsim.engines.arrays import record_of, state_in
from fedsim.errors import PluginError, RunError
from fedsim.wire.messages import State, as_received, as_sent, non_finite


def as_mod(defense: Defense, rng: torch.Generator | None = None) -> Mod:
    """A mod that applies `defense.on_update` to what the client is about to send.

        app = ClientApp(mods=[as_mod(GaussianNoise(clip=1.0, noise_multiplier=0.1))])

    The other hooks act inside local training and need fedsim's own ClientApp.
    What `on_update` hands back untouched is sent untouched, to the bit. A reply is refused, and so
    becomes an error of this client, if an array in it was never broadcast as it is and so cannot be
    defended, if it has several records of arrays, or if the defended update is NaN or infinite.

    Args:
        rng: source of the defense's randomness; None draws a fresh seed from the operating system.

    Raises:
        PluginError: it is no defense, does nothing, or acts inside local training.
    """
    a_defense(defense)
    for hook in INSIDE:
        if overrides(defense, hook):
            raise PluginError(
                f"{type(defense).__name__}: '{hook}' acts inside local training, where a mod cannot call it; "
                "use it in fedsim's own ClientApp, or leave the hook out"
            )
    source = rng or torch.Generator()
    if rng is None:
        source.seed()

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        sent = next(iter(message.content.array_records.values()), None)
        before = {} if sent is None else state_in(sent)
        reply = call_next(message, context)
        if reply.has_error() or message.metadata.message_type.split(".")[0] != "train":
            return reply
        if len(reply.content.array_records) > 1:
            raise RunError(
                f"{type(defense).__name__}: the reply has {len(reply.content.array_records)} records of arrays, but "
                "an update is defended as a whole; send one"
            )
        for key, record in reply.content.array_records.items():
            reply.content[key] = record_of(defended(defense, before, state_in(record), source))
        return reply

    return mod


def defended(defense: Defense, before: State, after: State, rng: torch.Generator) -> State:
    """What a client sends instead of `after`, having received `before`.

    Gradients in `after` are what the defense acts on as they are; of all else it acts on the difference to `before`.

    Raises:
        RunError: a tensor in `after` was not in `before`, or of another form, or is there twice, or the defended update
            is not one: other names or shapes, NaN or infinite.
    """
    name = type(defense).__name__
    gradient, rest = as_received(after)
    gradient = gradient or {}
    for key, tensor in (*rest.items(), *gradient.items()):
        if key in rest and key in gradient:
            raise RunError(f"{name}: '{key}' is sent both as weights and as a gradient; send one of them")
        if key not in before:
            raise RunError(
                f"{name}: '{key}' was not broadcast, so its update cannot be defended; "
                "broadcast it with the model, or do not send it"
            )
        # A count comes back from strategies that average as a real number; it says nothing of the data.
        kept = tensor.is_floating_point() == before[key].is_floating_point() or not tensor.ndim
        if not kept or tensor.is_complex() or tensor.shape != before[key].shape:
            raise RunError(
                f"{name}: '{key}' was broadcast as {kind(before[key])} and is to be sent as {kind(tensor)}, so its "
                "update cannot be defended; send it as it was broadcast, in real numbers"
            )
    floats = {key: tensor for key, tensor in rest.items() if tensor.is_floating_point()}
    update = {key: tensor - before[key] for key, tensor in floats.items()} | dict(gradient)
    sent = replaced(defense, "on_update", update, rng)
    if broken := non_finite(sent):
        raise RunError(f"{name}: the update of '{broken[0]}' is NaN or infinite")
    changed = {key: value for key, value in sent.items() if value is not update[key]}
    weights = {key: before[key] + value for key, value in changed.items() if key in floats}
    return {**after, **weights, **as_sent({key: changed[key] for key in gradient if key in changed}, {})}
