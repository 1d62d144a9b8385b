"""Does what an attack file says of somebody's app fit what was recorded? Checked without any truth, before any work."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fedsim.attacks import Attack
from fedsim.errors import ConfigError, DataError, TranscriptError, first_line, one_line, some_of
from fedsim.evaluation.truth import Truth
from fedsim.knowledge import Knowledge
from fedsim.randomness import generator
from fedsim.recording.transcript import Transcript
from fedsim.training.first_layer import first_layer
from fedsim.training.model_state import orders_of
from fedsim.wire.messages import State, Update, by_any

_NAMED = 6
"""Most layers that one sentence names."""
_COMPARED = 16
"""Clients whose first updates are compared with the model and each other, at most."""
_TRIED = 4
"""Examples that the cost of an attack is estimated with, and updates whose rank is found, at most."""
_PASSES = 4
"""How often what one pass keeps in memory is there at once, when a gradient is matched and differentiated."""
_BACKWARD = 3
"""How much longer the slope of a gradient takes than the gradient itself, about."""
_ROUNDING = 10.0
"""How much larger than one rounding of all weights a singular value of their difference is to be more than rounding."""
_LONG = 600.0
"""Seconds an attack may take before that is said beforehand."""
log = logging.getLogger(__name__)


def check_fit(transcript: Transcript, knowledge: Knowledge) -> None:
    """Raise ConfigError where the model or the loss cannot be those of the federation; warn of odd replies.

    Raises:
        TranscriptError: the recording cannot be read as the attack file says.
    """
    updates = _first_round(transcript)
    warn_of_replies(updates)
    if knowledge.model is None:
        return
    network = knowledge.model()
    _check_constants(network, knowledge.model, updates[0].before)
    if wrong := _unlike(network, updates[0].before):
        raise ConfigError(
            f"adversary.knowledge.model: does not fit round {updates[0].round} of client {updates[0].client}: {wrong}; "
            "give the model of that federation, or say what the messages mean with [app] prefix, record or frozen"
        )
    warn_of_still_layers(network, updates)
    if knowledge.input_shape is not None and knowledge.value_range is not None:
        check_outputs(network, knowledge)
        warn_of_counts(network, knowledge, updates)


def _check_constants(network: nn.Module, build: Callable[[], nn.Module], sent: State) -> None:
    """Buffers that the server did not send have to be the same each time that the model is built.

    Those that no message of this model would hold also have to be what the server sent, if it did.
    """
    kept, named = network.state_dict().keys(), by_any(sent, orders_of(network)) or {}
    constants = {name: tensor for name, tensor in network.named_buffers() if name not in named}
    if not constants:
        return
    again = dict(build().named_buffers())
    for name, tensor in constants.items():
        whence = ""
        if not torch.equal(tensor.cpu(), again[name].cpu()):
            whence = "each time it is built"
        elif name in sent and name not in kept and not torch.equal(tensor.cpu(), sent[name].to(tensor.dtype).cpu()):
            whence = "than the server sent"
        if whence:
            what = "buffer" if name in kept else "frozen"
            raise ConfigError(
                f"adversary.knowledge.model: its {what} '{name}' has other values {whence}; load the values that "
                "clients have, or seed it as they do"
            )


def check_outputs(network: nn.Module, knowledge: Knowledge) -> None:
    """Raise ConfigError where two examples give no logits of the classes, or these no loss."""
    outputs = _outputs(network, knowledge, 2)
    classes = knowledge.num_classes
    if not isinstance(outputs, Tensor):
        raise ConfigError(
            f"adversary.knowledge.model: returns a {type(outputs).__name__}, expected a tensor of logits; say how to "
            'make one of it with [app] outputs = "module:callable", a function of what it returns and of its inputs'
        )
    if classes is not None and tuple(outputs.shape) != (2, classes):
        raise ConfigError(
            f"adversary.knowledge.model: gives outputs of shape {tuple(outputs.shape)} for 2 examples, expected "
            f"(2, {classes}), a logit for each of num_classes; mend num_classes, name the loss that clients minimise "
            "with adversary.knowledge.loss, or make logits with [app] outputs"
        )
    if knowledge.loss is None:
        return
    loss, wrong = None, list[Exception]()
    for labels in (torch.zeros(2, dtype=torch.long), torch.zeros(2)):  # class indices, or targets of a regression
        try:
            loss = knowledge.loss(outputs, labels.to(outputs.device))
            break
        except Exception as error:  # anybody's function
            wrong.append(error)
    else:
        raise ConfigError(
            f"adversary.knowledge.loss: cannot be computed for outputs of shape {tuple(outputs.shape)} and labels of "
            f"shape (2,) ({type(wrong[0]).__name__}: {first_line(wrong[0])}); name the loss that clients minimise"
        ) from wrong[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(
            f"adversary.knowledge.loss: gives {got} for 2 examples, expected one number, their mean loss; return that"
        )


def check_truths(files: Mapping[str, Path], counts: Mapping[str, set[int]], knowledge: Knowledge) -> None:
    """Check the truth of each client, see `check_truth`, and that one of them is recorded.

    Args:
        files: by client.
        counts: see `counts_of`.

    Raises:
        ConfigError: none of them is recorded.
    """
    for who, file in files.items():
        check_truth(who, truth := Truth.load(file), knowledge)
        warn_of_count(who, len(truth.data), counts)
    if files and not counts.keys() & files.keys():
        raise ConfigError(
            f"truth: none of its clients ({', '.join(files)}) is recorded; recorded: "
            f"{some_of(counts, _NAMED)}; clients are called by their partition id where they "
            'report it, else by their node; "#1" is the first'
        )


def check_truth(who: str, truth: Truth, knowledge: Knowledge) -> None:
    """Raise DataError where what a client is said to have held cannot be what this model is trained on."""
    shape, classes = knowledge.input_shape, knowledge.num_classes
    if shape is not None and tuple(truth.data.shape[1:]) != tuple(shape):
        raise DataError(
            f"truth.{who}: its examples have shape {tuple(truth.data.shape[1:])}, input_shape is {tuple(shape)}; mend "
            "one of them"
        )
    if classes is None or truth.labels.is_floating_point() or not len(truth.labels):
        return
    low, high = int(truth.labels.min()), int(truth.labels.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"truth.{who}: its labels are from {low} to {high}, expected 0 to {classes - 1}, as num_classes is "
            f"{classes}; mend one of them"
        )


def counts_of(transcript: Transcript) -> dict[str, set[int]]:
    """By client, N of its updates."""
    found: dict[str, set[int]] = {}
    for number in transcript.rounds:
        with suppress(TranscriptError):  # a damaged round is reported when it is attacked
            for reply in transcript.header(number).replies:
                counted = transcript.reading.counted(reply.client, reply.num_examples)
                found.setdefault(str(reply.client), set()).add(counted)
    return found


def warn_of_count(who: str, held: int, counts: Mapping[str, set[int]]) -> None:
    """Say so where a client is said to have held another number of examples than N."""
    if (told := counts.get(who)) and held not in told:
        log.warning(
            "truth.%s: has %d examples, and N is %s; if clients count batches, say N with [app] num_examples",
            who,
            held,
            some_of(sorted(told), _NAMED),
        )


def warn_of_replies(updates: Sequence[Update]) -> None:
    """Say so where replies look like something else than the weights that they are read as.

    Args:
        updates: of one round.
    """
    first = updates[0]
    if len(updates) > 1 and all(_same(first.payload.arrays(), other.payload.arrays()) for other in updates[1:]):
        log.warning(
            "round %d: %s %d replies are identical; either no client trains, or these are copies of an aggregate",
            first.round,
            "all" if len(updates) < _COMPARED else "the first",
            len(updates),
        )
    for update in updates:
        if update.payload.kind != "weights" or not _comparable(update):
            continue
        sent, got = _norm(update.before), _norm(update.after)
        moved = _norm(update.pseudo_gradient)
        if sent > 0 and moved > 0.8 * sent and got < 0.5 * sent:
            log.warning(
                "round %d, client %d: its reply has norm %.3g, what it was sent %.3g, their difference %.3g; it looks "
                'like a delta or a gradient, which [app] replies = "delta" or "gradient" says',
                update.round,
                update.client,
                got,
                sent,
                moved,
            )
            return


def warn_of_counts(network: nn.Module, knowledge: Knowledge, updates: Sequence[Update]) -> None:
    """Say so where an update of a first linear layer has a larger rank than N.

    Each step of gradient descent adds a combination of inputs to each row of that layer's weights, so the rank is at
    most the number of examples, however many steps there are.

    Args:
        updates: of one round, which fit the network.
    """
    assert knowledge.input_shape is not None
    like = _inputs(network, knowledge, 2)
    drawn = torch.rand(like.shape, generator=generator("first layer"), dtype=like.dtype).to(like.device)
    layer = first_layer(network, drawn)
    if layer is None:
        return
    for update in updates[:_TRIED]:  # singular values of a wide layer take half a second
        moved = None
        with suppress(TranscriptError):  # an update that does not fit is reported when it is attacked
            moved = (by_any(update.pseudo_gradient, orders_of(network)) or {}).get(layer)
        if moved is None or not 0 < update.num_examples < min(moved.shape) or not torch.isfinite(moved).all():
            continue
        rounding = torch.finfo(torch.float32).eps * _norm(update.before) if update.payload.kind == "weights" else 0.0
        rank = int((torch.linalg.svdvals(moved.float()) > max(_ROUNDING * rounding, 1e-5 * moved.norm())).sum())
        if rank > update.num_examples:
            log.warning(
                "round %d, client %d: N is %d, but the update of '%s' has rank %d, more than so many examples make; if "
                "clients count batches, say N with [app] num_examples; other reasons are an optimiser that scales "
                "each weight (Adam), weight decay, or noise",
                *(update.round, update.client, update.num_examples, layer, rank),
            )
            return


def warn_of_still_layers(network: nn.Module, updates: Sequence[Update]) -> None:
    """Say which parameters moved in no reply, though `network` says that clients train them.

    Args:
        updates: of one round, which fit the network.
    """
    moved, orders = set[str](), orders_of(network)
    for update in updates:
        with suppress(TranscriptError):  # an update that does not fit is reported when it is attacked
            direction = by_any(update.pseudo_gradient, orders) or {}
            moved |= {name for name, tensor in direction.items() if tensor.any()}
    still = [name for name, parameter in network.named_parameters() if parameter.requires_grad and name not in moved]
    if still and moved:
        log.warning(
            "round %d: %s moved in no reply; if clients do not train them, set requires_grad = False on them in the "
            "function that adversary.knowledge.model names, or attacks expect that they move",
            updates[0].round,
            some_of(still, _NAMED),
        )


def warn_of_cost(attacks: Sequence[tuple[str, Attack]], transcript: Transcript, knowledge: Knowledge) -> None:
    """Say beforehand where an attack will take long, or more memory than there is, and which setting lowers that."""
    counts = [count for told in counts_of(transcript).values() for count in told]
    steps = {title: getattr(attack, "iterations", 0) * getattr(attack, "restarts", 1) for title, attack in attacks}
    if not counts or not any(steps.values()) or None in (knowledge.model, knowledge.input_shape, knowledge.value_range):
        return
    count = max(min(_TRIED, max(counts)), 1)
    try:
        kept, seconds = _pass(knowledge, count)
    except Exception:  # anybody's network; the attack itself says what is wrong with it
        log.debug("the cost of the attacks cannot be estimated", exc_info=True)
        return
    needed, there = kept / count * max(counts) * _PASSES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > there and knowledge.device.type == "cpu":
        log.warning(
            "an attack on %d examples takes about %.1f GB, %.1f GB are free; choose adversary.victims with fewer "
            "examples, or a device with more memory",
            max(counts),
            needed / 1e9,
            there / 1e9,
        )
    for title, number in steps.items():
        if (expected := seconds / count * max(counts) * number) > _LONG:
            log.warning(
                "%s: about %.0f minutes for a client with %d examples; attack.%s.iterations (now %d) lowers that",
                title,
                expected / 60,
                max(counts),
                title,
                number,
            )


def _pass(knowledge: Knowledge, count: int) -> tuple[int, float]:
    """Bytes that a forward pass over `count` examples keeps, and about how long a matched gradient takes."""
    assert knowledge.model is not None
    network = knowledge.model().to(knowledge.device)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        inputs = _inputs(network, knowledge, count).requires_grad_()
        started = time.monotonic()
        total = network.eval()(inputs).float().square().sum()
    total.backward()
    return sum(kept.values()), _BACKWARD * (time.monotonic() - started)


def _outputs(network: nn.Module, knowledge: Knowledge, count: int) -> Any:
    inputs = _inputs(network, knowledge, count)
    try:
        with torch.no_grad():
            return network.eval()(inputs)
    except Exception as error:  # anybody's network
        raise ConfigError(
            f"adversary.knowledge.model: does not take {count} inputs of shape {tuple(inputs.shape[1:])} "
            f"({type(error).__name__}: {first_line(error)}); mend input_shape or the model"
        ) from error


def _inputs(network: nn.Module, knowledge: Knowledge, count: int) -> Tensor:
    """Examples in the middle of the value range."""
    assert knowledge.input_shape is not None
    assert knowledge.value_range is not None
    middle = sum(map(sum, knowledge.value_range)) / sum(map(len, knowledge.value_range))
    like = next(network.parameters(), torch.empty(0))
    return torch.full((count, *knowledge.input_shape), float(middle), dtype=like.dtype, device=like.device)


def _first_round(transcript: Transcript) -> list[Update]:
    """The updates of the first round that has some which can be read, of `_COMPARED` clients at most.

    Raises:
        TranscriptError: no update is recorded, or none can be read.
    """
    failures = 0
    wrong: TranscriptError | None = None
    for number in transcript.rounds:
        found: list[Update] = []
        try:
            clients = transcript.clients(number)
            failures += len(transcript.header(number).failures)
        except TranscriptError as error:  # a damaged round is reported when it is attacked
            wrong = error
            continue
        for client in clients:
            try:
                found.append(transcript.reading.of(transcript.recorded(number, client)))
            except TranscriptError as error:  # likewise
                wrong = error
            if len(found) == _COMPARED:
                break
        if found:
            return found
    if wrong is not None:
        raise wrong
    raise TranscriptError(
        f"{transcript.folder}: holds no update; what failed ({failures}) is told by fedsim inspect --rows"
    )


def _unlike(network: nn.Module, state: State) -> str:
    """Which tensors of `network` and `state` do not fit, in words; nothing where `state` is one of the network."""
    orders = orders_of(network)
    if by_any(state, orders) is not None:
        return ""
    kept, trained = orders[0], orders[-1]
    order = next((order for order in orders if len(order) == len(state)), trained)
    if all(name.isdigit() for name in state):
        recorded = [state[name] for name in sorted(state, key=int)]
        told = [
            f"'{name}' {tuple(shape)} is recorded as {tuple(tensor.shape)}"
            for (name, shape), tensor in zip(order.items(), recorded, strict=False)
            if shape != tensor.shape
        ]
        told += [f"the model has {len(order)} tensors, the recording {len(state)}"] * (len(order) != len(state))
    else:
        told = [
            f"'{name}' {tuple(shape)} is {f'recorded as {tuple(state[name].shape)}' if name in state else 'not there'}"
            for name, shape in trained.items()
            if name not in state or state[name].shape != shape
        ]
        told += [f"the model has no '{name}'" for name in state if name not in kept]
    return one_line(some_of(told, _NAMED, "; ")) or "its tensors are of other shapes"


def _same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _comparable(update: Update) -> bool:
    return all(
        name in update.after and update.after[name].shape == tensor.shape and tensor.is_floating_point()
        for name, tensor in update.before.items()
    )


def _norm(state: State) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in state.values()))
