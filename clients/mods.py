"""A defense as a Flower mod: put it in front of any ClientApp's train function."""

from __future__ import annotations

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from clients.memory import as_it_was_after_failure, memory_of
from fedsim.defense import INSIDE, Defense, Memory, a_defense, agrees, kind, overrides, remembers, replaced_update
from fedsim.engines.arrays import record_of, state_in
from fedsim.errors import PluginError, RunError
from fedsim.wire.messages import State, non_finite
from fedsim.wire.payloads import Dense, Payload

_PARTITION = "partition-id"


def partition_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A mod that tells which partition of the data the client holds, so that findings can be scored.

        app = ClientApp(mods=[partition_mod])

    A curious server's recording then calls the client by that number, in every run. It is said in a ConfigRecord of its
    own, which no strategy reads; without it, a client is called by Flower's id of its node, which is drawn anew for
    each run. No attack learns more than a name from it.
    """
    reply = call_next(message, context)
    if reply.has_content() and _PARTITION in context.node_config:
        reply.content["fedsim"] = ConfigRecord({_PARTITION: int(context.node_config[_PARTITION])})
    return reply


def as_mod(defense: Defense, rng: torch.Generator | None = None) -> Mod:
    """A mod that applies `defense.on_update` to what the client is about to send.

        app = ClientApp(mods=[as_mod(UpdateNoise(clip=1.0, noise_multiplier=0.1))])

    The other hooks act inside local training and need fedsim's own ClientApp.
    A defense that asks for a memory has it in the `Context.state` of its client's node, under the name of its class.
    What `on_update` hands back untouched is sent untouched, to the bit; a `Payload` is decoded at the server by
    `strategies.curious.Curious`. A reply is refused, and so
    becomes an error of this client, if an array in it was never broadcast as it is and so cannot be
    defended, if it has several records of arrays, if the defended update is NaN or infinite, or if another mod
    keeps its memory under the same name.

    Args:
        rng: source of the defense's randomness; None draws a fresh seed from the operating system.

    Raises:
        PluginError: it is no defense, does nothing, acts inside local training, or its clients agree on something.
    """
    a_defense(defense)
    for hook in INSIDE:
        if overrides(defense, hook):
            raise PluginError(
                f"{type(defense).__name__}: '{hook}' acts inside local training, where a mod cannot call it; "
                "use it in fedsim's own ClientApp, or leave the hook out"
            )
    if agrees(defense):
        raise PluginError(
            f"{type(defense).__name__}: its clients agree on something in each round, for which a mod has no way; use "
            "it in fedsim's own ClientApp, or settings under which each client draws by itself"
        )
    source = rng or torch.Generator()
    if rng is None:
        source.seed()
    key = f"{type(defense).__module__}.{type(defense).__qualname__}"

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        broadcast = next(iter(message.content.array_records.values()), None)
        before = {} if broadcast is None else state_in(broadcast)
        with as_it_was_after_failure(context.state):
            kept = context.state.get(key)
            reply = call_next(message, context)
            if reply.has_error() or message.metadata.message_type.split(".")[0] != "train":
                return reply
            _check_can_be_defended(reply, defense)
            if remembers(defense) and context.state.get(key) is not kept:
                raise RunError(f"{key}: two mods of this class would share one memory; derive a class for each")
            for name, record in reply.content.array_records.items():
                sent = Payload.from_arrays(state_in(record), before)
                with memory_of(defense, key, context.state) as memory:
                    reply.content[name] = record_of(defended(defense, before, sent, source, memory).arrays())
            return reply

    return mod


def _check_can_be_defended(reply: Message, defense: Defense) -> None:
    if (count := len(reply.content.array_records)) > 1:
        raise RunError(
            f"{type(defense).__name__}: the reply has {count} records of arrays, but an update is defended as a whole; "
            "send one"
        )


def defended(
    defense: Defense,
    before: State,
    payload: Payload,
    rng: torch.Generator,
    memory: Memory | None = None,
    common: torch.Generator | None = None,
) -> Payload:
    """What a client sends instead of `payload`, having received `before`.

    Gradients and deltas are what the defense acts on as they are; of weights it acts on the difference to `before`.

    Args:
        memory: see `clients.memory.memory_of`.
        common: what all clients of the round draw alike, for a defense that `agrees`.

    Raises:
        RunError: a tensor was not in `before`, or of another form, or the defended update is not one: other names or
            shapes, NaN or infinite.
    """
    name = type(defense).__name__
    weights, rest = _weights(name, before, payload), payload.values("delta", before)
    rest = {**rest, **payload.values("gradient", before)}
    update = {key: tensor - before[key] for key, tensor in weights.items()} | rest
    sent = replaced_update(defense, update, rng, memory, common)
    values = sent.values("delta", before) if isinstance(sent, Payload) else sent
    if broken := non_finite(values):
        raise RunError(f"{name}: the update of '{broken[0]}' is NaN or infinite")
    tensors = dict(payload.tensors)
    for key, value in values.items():
        sent_as, _ = tensors[key]
        if isinstance(sent, Payload):
            tensors[key] = ("gradient" if sent_as == "gradient" else "delta", sent.tensors[key][1])
        elif value is not update[key]:
            tensors[key] = (sent_as, Dense(before[key] + value if sent_as == "weights" else value))
    return Payload(tensors)


def _weights(name: str, before: State, payload: Payload) -> State:
    """The weights in `payload` that have a difference to `before`; counts that are sent along have none."""
    for key in payload.tensors:
        if key not in before:
            raise RunError(
                f"{name}: '{key}' was not broadcast, so its update cannot be defended; "
                "broadcast it with the model, or do not send it"
            )
    weights = payload.values("weights", before)
    for key, tensor in (*weights.items(), *payload.values("gradient", before).items()):
        # A count comes back from strategies that average as a real number; it says nothing of the data.
        kept = tensor.is_floating_point() == before[key].is_floating_point() or not tensor.ndim
        if not kept or tensor.is_complex() or tensor.shape != before[key].shape:
            raise RunError(
                f"{name}: '{key}' was broadcast as {kind(before[key])} and is to be sent as {kind(tensor)}, so its "
                "update cannot be defended; send it as it was broadcast, in real numbers"
            )
    return {key: tensor for key, tensor in weights.items() if tensor.is_floating_point()}
