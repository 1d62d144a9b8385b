"""Checks of attacks."""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch

from fedsim.audit.evaluation.evaluator import FindingSpec, check_claim
from fedsim.audit.finding_files import finding_from_tensors, tensors_to_save
from fedsim.audit.threat_model import PRIVATE
from fedsim.base.errors import AttackError, KnowledgeError, TranscriptError, error_reason
from fedsim.base.randomness import generator
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, ContractViolation, DoesNotApply, NotChecked, expect
from fedsim.contract.recordings import OTHER, VICTIM, TinyRecording, recordings_for
from fedsim.contract.sender_claims import compare_swapped
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.findings import Finding
from fedsim.interfaces.knowledge import FACTS
from fedsim.plugins import registry
from fedsim.plugins.code_hashes import locate_error
from fedsim.recording.payloads import Dense, Form, Kind, Payload
from fedsim.recording.wire_format import Update

_ITERATIONS = 6
"""Value of the setting `iterations`, where an attack has it and it is not set."""


_REFUSED = "refused"
"""Key of the cache that says that a check has told why the attack works on no tiny case."""


def is_an_attack(subject: CheckedPlugin) -> None:
    """It derives from fedsim.Attack, and declares to read facts that can be known."""
    attack: Attack = common.build_instance(subject, Attack)
    for name in sorted((attack.needs | attack.uses) - set(FACTS)):
        raise ContractViolation(
            f"it declares to read '{name}', which is nothing that can be known; known: {', '.join(FACTS)}"
        )


def finishes_tiny_case(subject: CheckedPlugin) -> None:
    """It finishes on a tiny case and claims something that can be judged and saved."""
    scene, finding = _first_result(subject)
    # Its tensors can be saved.
    for name, tensor in finding.tensors.items():
        expect(tensor.device.type == "cpu", f"tensor '{name}' of what it claims is on {tensor.device}, expected cpu")
        expect(not tensor.requires_grad, f"tensor '{name}' of what it claims still requires a gradient; detach it")
    # Its evaluator accepts it.
    where = f"round {scene.transcript.rounds[0]}, client {VICTIM}"
    before = scene.transcript.update(scene.transcript.rounds[0], VICTIM).before
    spec = FindingSpec(
        where=where,
        knowledge=scene.knowledge.restrict_to(_build_attack(subject).readable_facts()),
        before=lambda: before,
        task=scene.task,
        clients=max(VICTIM, OTHER) + 1,
    )
    check_claim(finding, spec)
    # It is the same after being saved and read.
    saved = tensors_to_save(finding)
    reread = tensors_to_save(finding_from_tensors(finding.kind, saved))
    expect(common.are_equal(saved, reread), "what it claims is something else after being saved and read again")


def is_deterministic(subject: CheckedPlugin) -> None:
    """It finds the same bytes with the same seed, whatever the state of the global generators."""
    scene, finding = _first_result(subject)
    first = finding.tensors
    with common.seed_global_generators(2):
        second = _run(subject, scene).tensors
    expect(common.are_equal(first, second), "two runs with the same seed find different things; draw from 'rng' alone")
    # An attack that does not draw at all must not depend on the seed either.
    rng = generator(3)
    state_before = rng.get_state()
    with_other_seed = _run(subject, scene, rng=rng).tensors
    if torch.equal(rng.get_state(), state_before):
        expect(
            common.are_equal(first, with_other_seed),
            "it draws nothing from 'rng', and yet finds something else with another seed",
        )


def leaves_the_global_generators(subject: CheckedPlugin) -> None:
    """It leaves the global generators of torch, NumPy and Python alone."""
    scene, _ = _first_result(subject)
    with common.expect_untouched_generators():
        _run(subject, scene)


def needs_are_enough(subject: CheckedPlugin) -> None:
    """It needs no more facts than it declares, and is refused without any of them."""
    attack, refusals = _build_attack(subject), []
    for scene in _accepted_scenes(subject):
        try:
            _run(subject, scene, _grant_only(scene.knowledge, attack.needs))
        except (AttackError, KnowledgeError) as error:
            refusals.append(str(error))
            continue
        for name in sorted(attack.needs):
            _expect_refusal(subject, scene, name)
        return
    raise ContractViolation(f"with what it declares to need and nothing else it does not work: {refusals[0]}")


def refuses_before_any_work(subject: CheckedPlugin) -> None:
    """It is refused before it reads anything where a fact that it needs is withheld."""
    attack = _build_attack(subject)
    if not attack.needs:
        raise DoesNotApply("it needs nothing but the messages")
    unread: Any = None  # any access to the transcript or the generator would raise
    try:
        attack.run(Target(transcript=unread, victim=VICTIM, knowledge=Knowledge(), rng=unread))
    except KnowledgeError:
        return
    raise ContractViolation(f"without {', '.join(sorted(attack.needs))} it runs, although it declares to need that")


def reads_what_it_declares(subject: CheckedPlugin) -> None:
    """It reads all facts that it declares to use, and further knowledge changes nothing."""
    attack, read = _build_attack(subject), set[str]()
    for scene in _accepted_scenes(subject):
        with_all_facts = _run_with_recorded_reads(attack, scene, scene.knowledge, read)
        with_declared_facts = subject.cache[scene.description]
        if not common.are_equal(with_all_facts.tensors, with_declared_facts.tensors):
            if not common.are_equal(_run(subject, scene).tensors, with_declared_facts.tensors):
                raise NotChecked("it finds something else each time, whatever it knows")
            raise ContractViolation("its finding changes with knowledge that it does not declare")
        if attack.uses <= read:
            return
        if "labels" in attack.uses:  # some facts are only read to count labels that are withheld
            with suppress(AttackError):
                without_labels = dataclasses.replace(scene.knowledge, labels=None)
                _run_with_recorded_reads(attack, scene, without_labels, read)
    unread = sorted(attack.uses - read)
    expect(not unread, f"it declares to use {', '.join(unread)}, and reads nothing of the kind; leave it out of 'uses'")


def refuses_nothing_that_works(subject: CheckedPlugin) -> None:
    """It does not refuse, before a federation runs, facts or messages of a form on which it works."""
    attack = _build_attack(subject)
    if attack.subject not in ("numbers", "texts"):
        raise DoesNotApply("no federation of fedsim has what it is made on")
    _first_result(subject)
    for scene in recordings_for(attack, subject.folder):
        if scene.description not in subject.cache:  # the other checks were content with the first ones
            break
        if isinstance(subject.cache[scene.description], str):
            continue
        knowledge = scene.knowledge.restrict_to(attack.facts_to_grant())
        common_facts = knowledge.restrict_to(set(FACTS).difference(PRIVATE))
        update = scene.transcript.update(scene.transcript.rounds[0], VICTIM)
        try:
            attack.check_facts(common_facts, update.num_examples, knowledge.granted_facts())
            attack.check_message(_make_up_values(update), dataclasses.replace(common_facts, labels=knowledge.labels))
        except (AttackError, KnowledgeError, TranscriptError) as error:
            raise ContractViolation(f"it works on {scene.description}, and refuses them beforehand: {error}") from error


def _make_up_values(update: Update) -> Update:
    """Return a message of the same form, whose values tell nothing."""
    rng, tensors = generator("made up"), dict[str, tuple[Kind, Form]]()
    for name, (kind, _) in update.payload.tensors.items():
        shape = update.before[name].shape
        move = 1e-3 * torch.rand(shape, generator=rng)
        tensors[name] = (kind, Dense(move if kind == "gradient" else update.before[name] + move))
    return dataclasses.replace(update, payload=Payload(tensors), message=0)


def leaves_arguments_unchanged(subject: CheckedPlugin) -> None:
    """It changes neither the recording, nor the knowledge, nor the model that it is given."""
    scene, _ = _first_result(subject)
    knowledge = scene.knowledge
    assert knowledge.model is not None
    shared_model = knowledge.model()
    # Copy all tensors that the attack can reach.
    tensors: dict[str, torch.Tensor] = {}
    if knowledge.labels is not None:
        tensors["labels"] = knowledge.labels
    for fact, records in knowledge.tables.items():
        for field, tensor in records.tensors.items():
            tensors[f"{fact}.{field}"] = tensor
    for name, tensor in shared_model.state_dict().items():
        tensors[f"model's {name}"] = tensor
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    recording_hash = scene.transcript.hash()
    # Compare them after the attack.
    _run(subject, scene, dataclasses.replace(knowledge, model=lambda: shared_model))
    expect(scene.transcript.hash() == recording_hash, "it changes the recording")
    for name, copy in copies.items():
        expect(torch.equal(tensors[name], copy), f"it changes the {name} that it is given; work on a copy")
    has_no_gradients = all(p.grad is None for p in shared_model.parameters())
    expect(has_no_gradients, "it leaves gradients in the model that it is given")


def infers_senders_from_messages(subject: CheckedPlugin) -> None:
    """It infers whose records these are, or who sent a message, from messages and not from ids."""
    scene, finding = _first_result(subject)
    with tempfile.TemporaryDirectory(dir=subject.folder) as folder:
        compare_swapped(finding, scene, Path(folder) / "swapped", lambda swapped: _run(subject, swapped))


def reports_progress(subject: CheckedPlugin) -> None:
    """It reports its progress up to the last iteration, each with an objective."""
    scene, _ = _first_result(subject)
    calls: list[tuple[int, int, Mapping[str, float]]] = []
    target = scene.make_target(scene.knowledge, generator(0))
    _build_attack(subject).run(target, lambda *arguments: calls.append(arguments))
    expect(calls, "it never calls 'progress'")
    iterations = [iteration for iteration, _, _ in calls]
    expect(
        iterations == sorted(set(iterations)),
        f"its iterations are reported as {iterations[:9]}, expected each once and in order",
    )
    last_iteration, total, _ = calls[-1]
    expect(last_iteration == total, f"the last iteration reported is {last_iteration} of {total}; count from 1")
    for iteration, _, values in calls:
        if not math.isfinite(values.get("objective", math.nan)):
            raise ContractViolation(
                f"in iteration {iteration} it reports {dict(values)}, expected a finite 'objective'"
            )


CHECKS = (
    *common.CHECKS,
    is_an_attack,
    finishes_tiny_case,
    is_deterministic,
    leaves_the_global_generators,
    needs_are_enough,
    refuses_before_any_work,
    reads_what_it_declares,
    refuses_nothing_that_works,
    leaves_arguments_unchanged,
    infers_senders_from_messages,
    reports_progress,
)


def _build_attack(subject: CheckedPlugin) -> Attack:
    """Build the attack with its settings, for a few iterations unless these are set."""
    settings = {}
    if "iterations" in registry.setting_parameters(subject.cls) and "iterations" not in subject.settings:
        settings["iterations"] = _ITERATIONS
    return cast("Attack", subject.build(**settings))


def _run(
    subject: CheckedPlugin,
    scene: TinyRecording,
    knowledge: Knowledge | None = None,
    rng: torch.Generator | None = None,
) -> Finding:
    if knowledge is None:
        knowledge = scene.knowledge
    attack = _build_attack(subject)
    return attack.run(scene.make_target(knowledge, rng or generator(0)))


def _accepted_scenes(subject: CheckedPlugin) -> Iterator[TinyRecording]:
    """Yield the recordings on which the attack works when it is granted everything.

    They are recorded and attacked lazily; results are shared in `subject.cache`.
    """
    results: dict[str, Finding | str] = subject.cache
    for scene in recordings_for(_build_attack(subject), subject.folder):
        if scene.description not in results:
            results[scene.description] = _finding_or_refusal(subject, scene)
        if isinstance(results[scene.description], Finding):
            yield scene
    if all(isinstance(result, str) for result in results.values()):
        if _REFUSED in results:
            raise NotChecked("it works on no tiny case, as said above")
        cases_by_refusal: dict[str, list[str]] = {}
        for about, refusal in results.items():
            cases_by_refusal.setdefault(str(refusal), []).append(about)
        results[_REFUSED] = ""
        refusals = [f"{refusal} ({', '.join(cases)})" for refusal, cases in cases_by_refusal.items()]
        raise NotChecked(f"it works on no tiny case: {'; '.join(refusals)}")


def _finding_or_refusal(subject: CheckedPlugin, scene: TinyRecording) -> Finding | str:
    if missing := sorted(_build_attack(subject).needs - set(scene.knowledge.granted_facts())):
        return f"{', '.join(missing)} cannot be granted"
    try:
        return _run(subject, scene)
    except AttackError as error:
        return str(error)
    except Exception as error:
        if not subject.cache:
            raise
        # It is for another kind of recording, or what it claims there is wrong, which was said before.
        return f"{error_reason(error)} ({locate_error(error, type(_build_attack(subject)))})"


def _first_result(subject: CheckedPlugin) -> tuple[TinyRecording, Finding]:
    """Return the first recording on which the attack works, and its finding."""
    scene = next(_accepted_scenes(subject))
    return scene, subject.cache[scene.description]


def _grant_only(knowledge: Knowledge, names: frozenset[str]) -> Knowledge:
    granted = {name: getattr(knowledge, name) for name in names}
    return Knowledge(**granted, models=knowledge.models, modality=knowledge.modality)


def _expect_refusal(subject: CheckedPlugin, scene: TinyRecording, withheld: str) -> None:
    names = _build_attack(subject).needs - {withheld}
    try:
        _run(subject, scene, _grant_only(scene.knowledge, names))
    except KnowledgeError:
        return
    raise ContractViolation(f"without {withheld} it runs, although it declares to need that")


def _run_with_recorded_reads(attack: Attack, scene: TinyRecording, knowledge: Knowledge, read: set[str]) -> Finding:
    """Run the attack with all of `knowledge`; add the names of the facts it reads to `read`."""

    class RecordingKnowledge(Knowledge):
        """Knowledge that records which facts are read, except by `dataclasses.replace`."""

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in FACTS and sys._getframe(1).f_code.co_filename != dataclasses.__file__:
                read.add(name)
            return value

    values = {field.name: getattr(knowledge, field.name) for field in dataclasses.fields(knowledge)}
    recording_knowledge = RecordingKnowledge(**values)
    return attack._run(scene.make_target(recording_knowledge, generator(0)), lambda *_: None)
