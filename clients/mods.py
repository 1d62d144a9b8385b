"""Defenses as Flower mods, which act on the update of any ClientApp."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from clients.client_state import ClientMemories, restore_on_failure
from fedsim.base.errors import PluginError, RunError
from fedsim.federation.engines.arrays import make_record, read_state
from fedsim.interfaces.defense import TRAINING_HOOKS, Defense, overrides
from fedsim.interfaces.defense_calls import apply_on_update, describe_value
from fedsim.interfaces.defense_checks import check_defense
from fedsim.interfaces.local_context import LocalContext, copy_tensors
from fedsim.recording.payloads import Dense, Payload
from fedsim.recording.wire_format import State, non_finite_names

_PARTITION_KEY = "partition-id"


def partition_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Report the id of the client's data partition, so that findings can be scored (a mod).

        app = ClientApp(mods=[partition_mod])

    A curious server's recording then calls the client by this id, in every run. Otherwise it is
    called by Flower's id of its node, which is drawn anew for each run. The id is sent in a
    ConfigRecord that no strategy reads, and no attack learns more than a name from it.
    """
    reply = call_next(message, context)
    if reply.has_content() and _PARTITION_KEY in context.node_config:
        reply.content["fedsim"] = ConfigRecord({_PARTITION_KEY: int(context.node_config[_PARTITION_KEY])})
    return reply


def as_mod(defense: Defense, rng: torch.Generator | None = None) -> Mod:
    """Return a mod that applies `defense.on_update` to the client's update before it is sent.

        app = ClientApp(mods=[as_mod(UpdateNoise(clip=1.0, noise_multiplier=0.1))])

    The other hooks act inside local training and need fedsim's own ClientApp. The memory of a
    defense is in the `Context.state` of its client's node, under the name of its class. Tensors
    that `on_update` returns unchanged are sent unchanged, to the bit; a `Payload` is decoded at the
    server by `strategies.curious.Curious`.

    A reply becomes an error of its client if it has several records of arrays or none, if an array in it
    was not broadcast in the same form, if the defended update is NaN or infinite, if another mod
    keeps its memory under the same name, or if it acts in some rounds alone and the server names none.

    Args:
        defense: the defense.
        rng: source of its randomness; None draws a fresh seed from the operating system.

    Raises:
        PluginError: it is no defense, does nothing, acts inside local training, needs randomness
            that all clients share, or has settings that follow from a client's data and rounds.
    """
    # Refuse what needs local training, the other clients or the client's data, none of which a mod has.
    check_defense(defense)
    for hook in TRAINING_HOOKS:
        if overrides(defense, hook):
            raise PluginError(
                f"{type(defense).__name__}: '{hook}' acts inside local training, where a mod cannot call it; "
                "use it in fedsim's own ClientApp, or leave the hook out"
            )
    if defense.draws_in_common:
        raise PluginError(
            f"{type(defense).__name__}: its clients share random draws in each round, which a mod cannot do; use it "
            "in fedsim's own ClientApp, or choose settings under which each client draws alone"
        )
    if overrides(defense, "of_client"):
        raise PluginError(
            f"{type(defense).__name__}: its settings follow from the data and the rounds of each client, which a mod "
            "does not know; use it in fedsim's own ClientApp, or state what it draws itself"
        )
    source = rng or torch.Generator()
    if rng is None:
        source.seed()
    key = f"{type(defense).__module__}.{type(defense).__qualname__}"

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        broadcast = next(iter(message.content.array_records.values()), None)
        before = {} if broadcast is None else read_state(broadcast)
        with restore_on_failure(context.state):
            # Let the app train, and pass on what is no answer to a request to train.
            memory_record = context.state.get(key)
            reply = call_next(message, context)
            if reply.has_error() or message.metadata.message_type.split(".")[0] != "train":
                return reply
            name, record = _find_update(reply, defense)
            number = _round_number(message)
            if not number and overrides(defense, "acts_in"):
                raise RunError(
                    f"{key}: it does not act in all rounds, and the server's message names no round; let it send "
                    "'server-round' in its config"
                )
            if context.state.get(key) is not memory_record:
                raise RunError(f"{key}: two mods of this class would share one memory; derive a class for each")
            # Defend what is sent, and keep what the defense remembers.
            sent = Payload.from_arrays(read_state(record), before)
            memories = ClientMemories(context.state)
            hook_context = LocalContext(rng=source, round=number, broadcast=before, memory=memories.read_record(key))
            reply.content[name] = make_record(defend_payload(defense, before, sent, hook_context).arrays())
            memories.store()
            return reply

    return mod


def _round_number(message: Message) -> int:
    """Return the round that the server names, as Flower's strategies do; 0 where it names none."""
    for record in message.content.config_records.values():
        number = record.get("server-round")
        if isinstance(number, int):
            return number
    return 0


def _find_update(reply: Message, defense: Defense) -> tuple[str, ArrayRecord]:
    """Return the only record of arrays, after its name."""
    count = len(reply.content.array_records)
    if count > 1:
        raise RunError(
            f"{type(defense).__name__}: the reply has {count} records of arrays, but an update is defended as a whole; "
            "send one"
        )
    if not count:
        raise RunError(
            f"{type(defense).__name__}: the reply to a training message has no record of arrays, so that no update in "
            "it would be defended; send the update as an ArrayRecord, or leave the defense out"
        )
    ((name, record),) = reply.content.array_records.items()
    return name, record


def defend_payload(
    defense: Defense,
    before: State,
    payload: Payload,
    context: LocalContext,
) -> Payload:
    """Return the payload that a client sends instead of `payload`, after a defense.

    The defense acts on gradients and deltas as they are, and on the difference of weights to
    `before`.

    Args:
        defense: the defense, whose `on_update` is called.
        before: w_t, the state that the client received.
        context: what the hook may use.

    Raises:
        RunError: a tensor was not in `before`, or of another shape or type; or the defended update
            has other names or shapes, or is NaN or infinite.
    """
    name = type(defense).__name__
    weights = _floating_weights(name, before, payload)
    update = {key: tensor - before[key] for key, tensor in weights.items()}
    update |= payload.values("delta", before)
    update |= payload.values("gradient", before)
    sent = apply_on_update(defense, update, context)
    if isinstance(sent, Payload):  # the defense may write the next client's into the same memory
        sent = Payload.from_arrays(copy_tensors(sent.arrays()), before)
    values = sent.values("delta", before) if isinstance(sent, Payload) else sent
    if broken := non_finite_names(values):
        raise RunError(f"{name}: the update of '{broken[0]}' is NaN or infinite")
    tensors = dict(payload.tensors)
    for key, value in values.items():
        sent_kind, _ = tensors[key]
        if isinstance(sent, Payload):
            tensors[key] = ("gradient" if sent_kind == "gradient" else "delta", sent.tensors[key][1])
        elif value is not update[key]:
            tensors[key] = (sent_kind, Dense(before[key] + value if sent_kind == "weights" else value.clone()))
    return Payload(tensors)


def _floating_weights(name: str, before: State, payload: Payload) -> State:
    """Return the floating-point weights in `payload`, without integers such as counts.

    Raises:
        RunError: a tensor was not broadcast, or with another shape or type; or an array of integers, on which no
            defense acts, has changed.
    """
    for key in payload.tensors:
        if key not in before:
            raise RunError(
                f"{name}: '{key}' was not broadcast, so its update cannot be defended; "
                "broadcast it with the model, or do not send it"
            )
    weights = payload.values("weights", before)
    for key, tensor in (*weights.items(), *payload.values("gradient", before).items()):
        # Strategies average an integer count into a real number; it reveals nothing about the data.
        has_same_type = tensor.is_floating_point() == before[key].is_floating_point() or not tensor.ndim
        if not has_same_type or tensor.is_complex() or tensor.shape != before[key].shape:
            raise RunError(
                f"{name}: '{key}' was broadcast as {describe_value(before[key])} and is to be sent as "
                f"{describe_value(tensor)}, so its update cannot be defended; send it as it was broadcast, in real "
                "numbers"
            )
        if not tensor.is_floating_point() and tensor.ndim and not torch.equal(tensor, before[key].to(tensor)):
            raise RunError(
                f"{name}: '{key}' holds integers, on which no defense acts, and has changed since it was broadcast, so "
                "that it would be sent in clear; send it in real numbers, or leave it as it was"
            )
    return {key: tensor for key, tensor in weights.items() if tensor.is_floating_point()}
