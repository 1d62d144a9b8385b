"""Check, before any work, that what an attack file says of a foreign app fits the recording.

No check needs the victim's data, except those of the truth files themselves.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.stated_records import check_record_names, find_private_names, shared_shapes
from fedsim.base.errors import (
    ConfigError,
    DataError,
    TranscriptError,
    first_line,
    join_first,
    one_line,
)
from fedsim.base.loss_term import describe_undeclared_term
from fedsim.base.randomness import generator
from fedsim.base.task import goal_of
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.knowledge import Knowledge
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update, match_any_names
from fedsim.training.first_layer import find_first_layer, measure_rank
from fedsim.training.model_state import sendable_shapes
from fedsim.training.settings import known_steps

_MAX_NAMES = 6
"""Most layers that one sentence names."""
_MAX_CLIENTS = 16
"""Most clients whose first updates are compared with the model and with each other."""
_MAX_TRIALS = 4
"""Most examples for the estimate of an attack's cost, and most updates whose rank is computed."""
_DISTANCE_TOLERANCE = 0.05
"""Share by which the distance that control variates tell may differ from that of the stated local steps."""
_GRAPHS_IN_MEMORY = 4
"""Memory needed to differentiate a matched gradient, in forward passes."""
_DOUBLE_BACKWARD_COST = 3
"""About how many times longer it takes to differentiate a gradient than to compute it."""
_LONG_SECONDS = 600.0
"""Seconds from which on the expected time of an attack is worth a warning."""
log = logging.getLogger(__name__)


def check_fit(transcript: Transcript, knowledge: Knowledge) -> None:
    """Check model and loss against the first recorded round; warn of replies that look wrong.

    Raises:
        ConfigError: the model or the loss cannot be those of the federation.
        TranscriptError: the recording cannot be read as the attack file says.
    """
    updates = _first_updates(transcript)
    check_record_names(transcript)
    warn_of_replies(updates)
    if transcript.message_format.controls and not transcript.message_format.defended:
        check_control_distance(transcript, knowledge, updates)
    if knowledge.model is None:
        return
    network = knowledge.model()
    private_names = find_private_names(network, transcript.message_format.private, updates[0].before)
    _check_constants(network, knowledge.model, updates[0].before, private_names)
    mismatch = _shape_mismatch(network, updates[0].before, private_names)
    if mismatch:
        raise ConfigError(
            f"adversary.knowledge.model: does not fit round {updates[0].round} of client "
            f"{updates[0].client}: {mismatch}; give the model of that federation, or say what the "
            "messages mean with [app] prefix, record, frozen or private"
        )
    warn_of_still_layers(network, updates, private_names)
    if knowledge.input_shape is not None and knowledge.value_range is not None:
        check_outputs(network, knowledge)
        warn_of_update_ranks(network, knowledge, updates)


def check_control_distance(transcript: Transcript, knowledge: Knowledge, updates: Sequence[Update]) -> None:
    """Check how far clients moved by their control variates, which tell nothing of a factor that all of them have.

    An app that divides by another number of steps, or by another learning rate, than its clients take, is read
    wrongly from the second round on, and its messages fit all the same.

    Raises:
        ConfigError: it is not as far as the local steps and the learning rate that the attack file states.
    """
    for update in updates:
        fitted = transcript.fit_control_distance(update.round, update.client)
        steps = known_steps(knowledge, update.num_examples)
        where = f"round {update.round}, client {update.client}"
        if not fitted:
            continue
        if steps is None or knowledge.learning_rate is None:
            log.warning(
                "[app] controls: %s moved %.3g times its mean step by its control variates, which has to be the number "
                "of local steps times their learning rate; nothing says whether it is, and where the app divides by "
                "another number, attacks on later rounds read its gradients wrongly; state learning_rate, batch_size "
                "and local_epochs under [adversary.knowledge], and it is checked",
                where,
                fitted,
            )
            return
        expected = steps * knowledge.learning_rate
        if not math.isclose(fitted, expected, rel_tol=_DISTANCE_TOLERANCE):
            raise ConfigError(
                f"[app] controls: {where} moved {fitted:.3g} times its mean step by its control variates, and "
                f"{steps} local steps of learning rate {knowledge.learning_rate:g} are {expected:.3g}; mend "
                "learning_rate, batch_size or local_epochs under [adversary.knowledge], or leave controls out and "
                "attack the first round, where the app divides by another number than its clients take steps"
            )


def _check_constants(
    network: nn.Module, build: Callable[[], nn.Module], sent: State, private_names: Collection[str]
) -> None:
    """Check that buffers which the server did not send are the same each time the model is built.

    Buffers that no message of this model would hold (frozen parameters) must also equal what the
    server sent, if it did. Those of parts that stay with clients may have any values.
    """
    persistent = network.state_dict().keys()
    received = match_any_names(sent, shared_shapes(network, private_names)) or {}
    known_names = {*received, *private_names}
    constants = {name: tensor for name, tensor in network.named_buffers() if name not in known_names}
    if not constants:
        return
    rebuilt = dict(build().named_buffers())
    for name, tensor in constants.items():
        kind = "buffer" if name in persistent else "frozen"
        difference = ""
        if not torch.equal(tensor.cpu(), rebuilt[name].cpu()):
            difference = "each time it is built"
        elif kind == "frozen" and name in sent:
            sent_tensor = sent[name].to(tensor.dtype).cpu()
            difference = "" if torch.equal(tensor.cpu(), sent_tensor) else "than the server sent"
        if difference:
            raise ConfigError(
                f"adversary.knowledge.model: its {kind} '{name}' has other values {difference}; "
                "load the values that clients have, or seed it as they do"
            )


def check_outputs(network: nn.Module, knowledge: Knowledge) -> None:
    """Raise ConfigError unless two examples give a logit for each class, and these a loss."""
    outputs = _model_outputs(network, knowledge, 2)
    classes = knowledge.num_classes
    if complaint := describe_undeclared_term(network, outputs):
        raise ConfigError(f"adversary.knowledge.model: {complaint}")
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
    if outputs.ndim == 4 and goal_of(knowledge.loss) == "classes":
        raise ConfigError(
            f"adversary.knowledge.model: gives outputs of shape {tuple(outputs.shape)} for 2 examples, logits of "
            'pixels, and the loss is one of classes; name loss = "segmentation", or make a logit for each class '
            "with [app] outputs"
        )
    loss, errors = None, list[Exception]()
    # Try class indices, then targets of a regression, then several labels or numbers an example.
    for labels in (torch.zeros(2, dtype=torch.long), torch.zeros(2), torch.zeros(outputs.shape)):
        try:
            loss = knowledge.loss(outputs, labels.to(outputs.device))
            break
        except Exception as error:  # anybody's function
            errors.append(error)
    else:
        raise ConfigError(
            f"adversary.knowledge.loss: cannot be computed for outputs of shape {tuple(outputs.shape)} and labels of "
            f"shape (2,) ({type(errors[0]).__name__}: {first_line(errors[0])}); name the loss that clients minimise"
        ) from errors[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        returned = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(
            f"adversary.knowledge.loss: gives {returned} for 2 examples, expected one number, "
            "their mean loss; return that"
        )


def check_truths(files: Mapping[str, Path], counts: Mapping[str, set[int]], knowledge: Knowledge) -> None:
    """Check the truth file of each client, and that at least one of them is recorded.

    Args:
        files: by client.
        counts: see `count_examples`.

    Raises:
        ConfigError: none of them is recorded.
    """
    for client, file in files.items():
        truth = Truth.load(file)
        if truth.answers:  # which are no examples
            continue
        check_truth(client, truth, knowledge)
        warn_of_truth_size(client, len(truth.data), counts)
    if files and not counts.keys() & files.keys():
        raise ConfigError(
            f"truth: none of its clients ({', '.join(files)}) is recorded; recorded: "
            f"{join_first(counts, _MAX_NAMES)}; clients are called by their partition id where they "
            'report it (fedsim.partition_mod in the ClientApp), else by their node; "#1" is the first'
        )


def check_truth(client: str, truth: Truth, knowledge: Knowledge) -> None:
    """Raise DataError where a truth file cannot be data that this model was trained on."""
    shape, classes = knowledge.input_shape, knowledge.num_classes
    if shape is not None and tuple(truth.data.shape[1:]) != tuple(shape):
        raise DataError(
            f"truth.{client}: its examples have shape {tuple(truth.data.shape[1:])}, input_shape is {tuple(shape)}; "
            "mend one of them"
        )
    if classes is None or truth.labels.is_floating_point() or not len(truth.labels):
        return
    low, high = int(truth.labels.min()), int(truth.labels.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"truth.{client}: its labels are from {low} to {high}, expected 0 to {classes - 1}, as num_classes is "
            f"{classes}; mend one of them"
        )


def count_examples(transcript: Transcript) -> dict[str, set[int]]:
    """Map each client to the numbers of examples N of its updates."""
    counts: dict[str, set[int]] = {}
    for number in transcript.rounds:
        with suppress(TranscriptError):  # a damaged round is reported when it is attacked
            for reply in transcript.header(number).replies:
                num_examples = transcript.message_format.num_examples_of(reply.client, reply.num_examples)
                counts.setdefault(str(reply.client), set()).add(num_examples)
    return counts


def warn_of_truth_size(client: str, size: int, counts: Mapping[str, set[int]]) -> None:
    """Warn where a client's truth file holds another number of examples than N.

    Args:
        size: examples in the file.
        counts: see `count_examples`.
    """
    reported = counts.get(client)
    if reported and size not in reported:
        log.warning(
            "truth.%s: has %d examples, and N is %s; if clients count batches, say N with [app] num_examples",
            client,
            size,
            join_first(sorted(reported), _MAX_NAMES),
        )


def warn_of_replies(updates: Sequence[Update]) -> None:
    """Warn where replies do not look like the weights that they are read as.

    Args:
        updates: of one round.
    """
    first = updates[0]
    copies = [_equal(first.payload.arrays(), update.payload.arrays()) for update in updates[1:]]
    if copies and all(copies):
        log.warning(
            "round %d: %s %d replies are identical; either no client trains, or these are copies of an aggregate",
            first.round,
            "all" if len(updates) < _MAX_CLIENTS else "the first",
            len(updates),
        )
    for update in updates:
        if update.payload.kind != "weights" or not _has_equal_shapes(update):
            continue
        # A delta read as weights is small, and differs from the broadcast by about the broadcast.
        broadcast_norm, reply_norm = _l2_norm(update.before), _l2_norm(update.after)
        distance = _l2_norm(update.pseudo_gradient)
        if broadcast_norm > 0 and distance > 0.8 * broadcast_norm and reply_norm < 0.5 * broadcast_norm:
            log.warning(
                "round %d, client %d: its reply has norm %.3g, what it was sent %.3g, their difference %.3g; it looks "
                'like a delta or a gradient, which [app] replies = "delta" or "gradient" says',
                update.round,
                update.client,
                reply_norm,
                broadcast_norm,
                distance,
            )
            return


def warn_of_update_ranks(network: nn.Module, knowledge: Knowledge, updates: Sequence[Update]) -> None:
    """Warn where the update of a first linear layer has a larger rank than N, see `measure_rank`.

    Args:
        updates: of one round, which fit the network.
    """
    assert knowledge.input_shape is not None
    grey = _grey_inputs(network, knowledge, 2)
    rng = generator("first layer")
    noise = torch.rand(grey.shape, generator=rng, dtype=grey.dtype).to(grey.device)
    layer = find_first_layer(network, noise)
    if layer is None:
        return
    for update in updates[:_MAX_TRIALS]:  # singular values of a wide layer take half a second
        change = None
        with suppress(TranscriptError):  # an update that does not fit is reported when it is attacked
            change = (match_any_names(update.pseudo_gradient, sendable_shapes(network)) or {}).get(layer)
        if change is None or not torch.isfinite(change).all():
            continue
        if not 0 < update.num_examples < min(change.shape):
            continue
        # The difference of two weights carries the rounding of both.
        rounding = 0.0
        if update.payload.kind == "weights":
            rounding = torch.finfo(torch.float32).eps * _l2_norm(update.before)
        rank, _ = measure_rank(change, rounding)
        if rank > update.num_examples:
            log.warning(
                "round %d, client %d: N is %d, but the update of '%s' has rank %d, more than so many examples make; if "
                "clients count batches, say N with [app] num_examples; other reasons are an optimiser that scales "
                "each weight (Adam), weight decay, or noise",
                *(update.round, update.client, update.num_examples, layer, rank),
            )
            return


def warn_of_still_layers(
    network: nn.Module, updates: Sequence[Update], private_names: Collection[str] = frozenset()
) -> None:
    """Warn of parameters that no reply changed, though `network` says that clients train them.

    Args:
        updates: of one round, which fit the network.
        private_names: tensors that stay with the clients.
    """
    changed, orders = set[str](), shared_shapes(network, private_names)
    for update in updates:
        with suppress(TranscriptError):  # an update that does not fit is reported when it is attacked
            pseudo_gradient = match_any_names(update.pseudo_gradient, orders) or {}
            changed |= {name for name, tensor in pseudo_gradient.items() if tensor.any()}
    parameters = [(name, parameter) for name, parameter in network.named_parameters() if name not in private_names]
    trained = [name for name, parameter in parameters if parameter.requires_grad]
    unchanged = [name for name in trained if name not in changed]
    if unchanged and changed:
        log.warning(
            "round %d: %s moved in no reply; if clients do not train them, set requires_grad = False on them in the "
            "function that adversary.knowledge.model names, or attacks expect that they move",
            updates[0].round,
            join_first(unchanged, _MAX_NAMES),
        )


def warn_of_cost(attacks: Sequence[tuple[str, Attack]], transcript: Transcript, knowledge: Knowledge) -> None:
    """Warn beforehand of attacks that take long or too much memory, and say what helps."""
    counts = [count for client_counts in count_examples(transcript).values() for count in client_counts]
    steps: dict[str, int] = {}
    for title, attack in attacks:
        steps[title] = getattr(attack, "iterations", 0) * getattr(attack, "restarts", 1)
    if not counts or not any(steps.values()):
        return
    if None in (knowledge.model, knowledge.input_shape, knowledge.value_range):
        return
    # Measure a pass over a few examples; memory and time grow with their number.
    trial_count = max(min(_MAX_TRIALS, max(counts)), 1)
    try:
        trial_bytes, trial_seconds = _measure_pass(knowledge, trial_count)
    except Exception:  # anybody's network; the attack itself says what is wrong with it
        log.debug("the cost of the attacks cannot be estimated", exc_info=True)
        return
    needed = trial_bytes / trial_count * max(counts) * _GRAPHS_IN_MEMORY
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > available and knowledge.device.type == "cpu":
        log.warning(
            "an attack on %d examples takes about %.1f GB, %.1f GB are free; choose adversary.victims with fewer "
            "examples, or a device with more memory",
            max(counts),
            needed / 1e9,
            available / 1e9,
        )
    for title, number in steps.items():
        expected = trial_seconds / trial_count * max(counts) * number
        if expected > _LONG_SECONDS:
            log.warning(
                "%s: about %.0f minutes for a client with %d examples; attack.%s.iterations (now %d) lowers that",
                title,
                expected / 60,
                max(counts),
                title,
                number,
            )


def _measure_pass(knowledge: Knowledge, count: int) -> tuple[int, float]:
    """Return the bytes that a forward pass keeps, and the seconds of a matching step.

    A matching step computes a gradient and differentiates it; its time is an estimate.
    """
    assert knowledge.model is not None
    network = knowledge.model().to(knowledge.device)
    saved_bytes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        inputs = _grey_inputs(network, knowledge, count).requires_grad_()
        start = time.monotonic()
        total = network.eval()(inputs).float().square().sum()
    total.backward()
    return sum(saved_bytes.values()), _DOUBLE_BACKWARD_COST * (time.monotonic() - start)


def _model_outputs(network: nn.Module, knowledge: Knowledge, count: int) -> Any:
    inputs = _grey_inputs(network, knowledge, count)
    try:
        with torch.no_grad():
            return network.eval()(inputs)
    except Exception as error:  # anybody's network
        raise ConfigError(
            f"adversary.knowledge.model: does not take {count} inputs of shape {tuple(inputs.shape[1:])} "
            f"({type(error).__name__}: {first_line(error)}); mend input_shape or the model"
        ) from error


def _grey_inputs(network: nn.Module, knowledge: Knowledge, count: int) -> Tensor:
    """Return `count` examples in the middle of the value range."""
    assert knowledge.input_shape is not None
    assert knowledge.value_range is not None
    middle = sum(map(sum, knowledge.value_range)) / sum(map(len, knowledge.value_range))
    weight = next(network.parameters(), torch.empty(0))
    shape = (count, *knowledge.input_shape)
    return torch.full(shape, float(middle), dtype=weight.dtype, device=weight.device)


def _first_updates(transcript: Transcript) -> list[Update]:
    """Return the updates of the first readable round, of `_MAX_CLIENTS` clients at most.

    Raises:
        TranscriptError: no update is recorded, or none can be read.
    """
    failures = 0
    last_error: TranscriptError | None = None
    for number in transcript.rounds:
        updates: list[Update] = []
        try:
            clients = transcript.clients(number)
            failures += len(transcript.header(number).failures)
        except TranscriptError as error:  # a damaged round is reported when it is attacked
            last_error = error
            continue
        for client in clients:
            try:
                if transcript.message_format.controls:  # whether they are there is said before any work
                    updates.append(transcript.update(number, client))
                else:
                    updates.append(transcript.message_format.read(transcript.recorded_update(number, client)))
            except TranscriptError as error:  # likewise
                last_error = error
            if len(updates) == _MAX_CLIENTS:
                break
        if updates:
            return updates
    if last_error is not None:
        raise last_error
    raise TranscriptError(f"{transcript.folder}: holds no update; fedsim inspect --rows lists what failed ({failures})")


def _shape_mismatch(network: nn.Module, state: State, private_names: Collection[str] = frozenset()) -> str:
    """Say which shared tensors of `network` and `state` do not fit; empty where all fit."""
    orders = shared_shapes(network, private_names)
    if match_any_names(state, orders) is not None:
        return ""
    all_tensors, trained_tensors = orders[0], orders[-1]
    if all(name.isdigit() for name in state):
        complaints = _mismatch_by_position(orders, state)
    else:
        complaints = []
        for name, shape in trained_tensors.items():
            if name not in state:
                complaints.append(f"'{name}' {tuple(shape)} is not there")
            elif state[name].shape != shape:
                recorded_shape = tuple(state[name].shape)
                complaints.append(f"'{name}' {tuple(shape)} is recorded as {recorded_shape}")
        complaints += [f"the model has no '{name}'" for name in state if name not in all_tensors]
    return one_line(join_first(complaints, _MAX_NAMES, "; ")) or "its tensors are of other shapes"


def _mismatch_by_position(orders: Sequence[Mapping[str, torch.Size]], state: State) -> list[str]:
    """Compare a recording whose tensors have numbers as names with the model's tensors."""
    order = next((order for order in orders if len(order) == len(state)), orders[-1])
    recorded = [state[name] for name in sorted(state, key=int)]
    complaints = []
    for (name, shape), tensor in zip(order.items(), recorded, strict=False):
        if shape != tensor.shape:
            complaints.append(f"'{name}' {tuple(shape)} is recorded as {tuple(tensor.shape)}")
    if len(order) != len(state):
        complaints.append(f"the model has {len(order)} tensors, the recording {len(state)}")
    return complaints


def _equal(first: State, second: State) -> bool:
    if first.keys() != second.keys():
        return False
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def _has_equal_shapes(update: Update) -> bool:
    """Return whether the reply has the broadcast's floating-point tensors and shapes."""
    return all(
        name in update.after and update.after[name].shape == tensor.shape and tensor.is_floating_point()
        for name, tensor in update.before.items()
    )


def _l2_norm(state: State) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in state.values()))
