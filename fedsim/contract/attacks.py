"""What an attack keeps to."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

import torch

from fedsim.attacks import Attack, Knowledge
from fedsim.contract import common
from fedsim.contract.checks import Broken, DoesNotApply, NotChecked, Subject, expect
from fedsim.contract.scenes import OTHER, VICTIM, Scene, scenes_for
from fedsim.errors import AttackError, KnowledgeError
from fedsim.evaluation.kind import Owed, evaluator_of
from fedsim.findings import Finding
from fedsim.knowledge import FACTS
from fedsim.plugins import registry
from fedsim.randomness import generator
from fedsim.recording.finding_files import finding_of, to_save

_FEW = 6
"""Iterations, where the attack has a setting of that name that is not set."""


def is_an_attack(subject: Subject) -> None:
    """It derives from fedsim.Attack, and declares to read what can be known."""
    attack = subject.build()
    expect(isinstance(attack, Attack), f"{type(attack).__name__} does not derive from fedsim.Attack")
    for name in sorted((attack.needs | attack.uses) - set(FACTS)):
        raise Broken(f"it declares to read '{name}', which is nothing that can be known; known: {', '.join(FACTS)}")


def finishes(subject: Subject) -> None:
    """It finishes on a tiny case and claims something that can be judged and saved."""
    scene, finding = _first(subject)
    for name, tensor in finding.tensors.items():
        expect(tensor.device.type == "cpu", f"tensor '{name}' of what it claims is on {tensor.device}, expected cpu")
        expect(not tensor.requires_grad, f"tensor '{name}' of what it claims still requires a gradient; detach it")
    where = f"round {scene.transcript.rounds[0]}, client {VICTIM}"
    before = scene.transcript.update(scene.transcript.rounds[0], VICTIM).before
    owed = Owed(
        where=where, knowledge=scene.knowledge, before=lambda: before, task=scene.task, clients=max(VICTIM, OTHER) + 1
    )
    evaluator_of(finding).form(finding, owed)
    saved = to_save(finding)
    again = to_save(finding_of(finding.kind, saved))
    expect(common.same(saved, again), "what it claims is something else after being saved and read again")


def finds_the_same_again(subject: Subject) -> None:
    """With the same seed it finds the same bytes, whatever the state of the global generators."""
    scene, _ = _first(subject)
    with common.other_global_generators(1):
        first = _run(subject, scene, seed=1).tensors
    with common.other_global_generators(2):
        again = _run(subject, scene, seed=1).tensors
    expect(common.same(first, again), "two runs with the same seed find different things; draw from 'rng' alone")
    rng = generator(3)
    untouched, other = rng.get_state(), _run(subject, scene, rng=rng).tensors
    if torch.equal(rng.get_state(), untouched):
        expect(common.same(first, other), "it draws nothing from 'rng', and yet finds something else with another seed")


def leaves_the_global_generators(subject: Subject) -> None:
    """It leaves the global generators of torch, NumPy and Python alone."""
    scene, _ = _first(subject)
    with common.global_generators_untouched():
        _run(subject, scene)


def needs_are_enough(subject: Subject) -> None:
    """What it declares to need is enough, and without any of it the attack is refused."""
    attack, refusals = _attack(subject), []
    for scene in _accepted(subject):
        try:
            _run(subject, scene, _only(scene.knowledge, attack.needs))
        except (AttackError, KnowledgeError) as error:
            refusals.append(str(error))
            continue
        for name in sorted(attack.needs):
            _expect_refusal(subject, scene, name)
        return
    raise Broken(f"with what it declares to need and nothing else it does not work: {refusals[0]}")


def refuses_before_any_work(subject: Subject) -> None:
    """Where what it needs is withheld, it is refused before it reads anything."""
    attack = _attack(subject)
    if not attack.needs:
        raise DoesNotApply("it needs nothing but the messages")
    nothing: Any = None
    try:
        attack.run(nothing, Knowledge(), victim=VICTIM, rng=nothing)
    except KnowledgeError:
        return
    raise Broken(f"without {', '.join(sorted(attack.needs))} it runs, although it declares to need that")


def reads_what_it_declares(subject: Subject) -> None:
    """It reads all that it declares to use, and further knowledge changes nothing."""
    attack, read = _attack(subject), set[str]()
    for scene in _accepted(subject):
        whole = _watched(attack, scene, scene.knowledge, read)
        declared = _run(subject, scene)
        expect(
            common.same(whole.tensors, declared.tensors), "its finding changes with knowledge that it does not declare"
        )
        if attack.uses <= read:
            return
        if "labels" in attack.uses:  # some facts serve to count labels that are withheld
            with suppress(AttackError):
                _watched(attack, scene, dataclasses.replace(scene.knowledge, labels=None), read)
    unread = sorted(attack.uses - read)
    expect(not unread, f"it declares to use {', '.join(unread)}, and reads nothing of the kind; leave it out of 'uses'")


def changes_nothing_it_is_given(subject: Subject) -> None:
    """It changes neither the recording, nor the knowledge, nor the model that it is given."""
    scene, _ = _first(subject)
    known = scene.knowledge
    assert known.model is not None
    shared = known.model()
    tensors = {"labels": known.labels} | {
        f"{what}.{part}": tensor for what, table in known.tables.items() for part, tensor in table.tensors.items()
    }
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    given |= {f"model's {name}": tensor for name, tensor in shared.state_dict().items()}
    copies, recording = {name: tensor.clone() for name, tensor in given.items()}, scene.transcript.hash()
    _run(subject, scene, dataclasses.replace(known, model=lambda: shared))
    expect(scene.transcript.hash() == recording, "it changes the recording")
    for name, copy in copies.items():
        expect(torch.equal(given[name], copy), f"it changes the {name} that it is given; work on a copy")
    expect(all(p.grad is None for p in shared.parameters()), "it leaves gradients in the model that it is given")


def reports_progress(subject: Subject) -> None:
    """It reports its progress up to the last iteration, each with an objective."""
    scene, _ = _first(subject)
    seen: list[tuple[int, int, Mapping[str, float]]] = []
    _attack(subject).run(
        scene.transcript,
        scene.knowledge,
        victim=VICTIM,
        rng=generator(0),
        progress=lambda *event: seen.append(event),
    )
    expect(seen, "it never calls 'progress'")
    steps = [step for step, _, _ in seen]
    expect(steps == sorted(set(steps)), f"its iterations are reported as {steps[:9]}, expected each once and in order")
    expect(seen[-1][0] == seen[-1][1], f"the last iteration reported is {seen[-1][0]} of {seen[-1][1]}")
    for step, _, values in seen:
        if not math.isfinite(values.get("objective", math.nan)):
            raise Broken(f"in iteration {step} it reports {dict(values)}, expected a finite 'objective'")


CHECKS = (
    *common.CHECKS,
    is_an_attack,
    finishes,
    finds_the_same_again,
    leaves_the_global_generators,
    needs_are_enough,
    refuses_before_any_work,
    reads_what_it_declares,
    changes_nothing_it_is_given,
    reports_progress,
)


def _attack(subject: Subject) -> Attack:
    """With its settings, for a few iterations."""
    few = "iterations" in registry.parameters(subject.cls) and "iterations" not in subject.settings
    return cast("Attack", subject.build(**({"iterations": _FEW} if few else {})))


def _run(
    subject: Subject,
    scene: Scene,
    knowledge: Knowledge | None = None,
    *,
    seed: int = 0,
    rng: torch.Generator | None = None,
) -> Finding:
    known = scene.knowledge if knowledge is None else knowledge
    return _attack(subject).run(scene.transcript, known, victim=VICTIM, rng=rng or generator(seed))


def _accepted(subject: Subject) -> Iterator[Scene]:
    """The scenes that the attack works on when it is granted everything, tried one after the other as they are needed.

    Raises:
        NotChecked: there are none.
    """
    tried: dict[str, Finding | str] = subject.kept
    for scene in scenes_for(_attack(subject), subject.folder):
        if scene.about not in tried:
            tried[scene.about] = _tried(subject, scene)
        if isinstance(tried[scene.about], Finding):
            yield scene
    if all(isinstance(refusal, str) for refusal in tried.values()):
        raise NotChecked(f"it works on no tiny case: {'; '.join(f'{about}: {why}' for about, why in tried.items())}")


def _tried(subject: Subject, scene: Scene) -> Finding | str:
    """What the attack finds in `scene`, or why it refuses it."""
    if lacking := sorted(_attack(subject).needs - set(scene.knowledge.granted())):
        return f"{', '.join(lacking)} cannot be granted"
    try:
        return _run(subject, scene)
    except AttackError as error:
        return str(error)


def _first(subject: Subject) -> tuple[Scene, Finding]:
    scene = next(_accepted(subject))
    return scene, subject.kept[scene.about]


def _only(known: Knowledge, names: frozenset[str]) -> Knowledge:
    return Knowledge(**{name: getattr(known, name) for name in names}, models=known.models)


def _expect_refusal(subject: Subject, scene: Scene, withheld: str) -> None:
    try:
        _run(subject, scene, _only(scene.knowledge, _attack(subject).needs - {withheld}))
    except KnowledgeError:
        return
    raise Broken(f"without {withheld} it runs, although it declares to need that")


def _watched(attack: Attack, scene: Scene, known: Knowledge, read: set[str]) -> Finding:
    """What it finds when it is handed all of `known`; the names of the facts that it reads are added to `read`."""

    class Watched(Knowledge):
        """Notes who reads which fact; copies of the whole do not count."""

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in FACTS and sys._getframe(1).f_code.co_filename != dataclasses.__file__:
                read.add(name)
            return value

    fields = [field.name for field in dataclasses.fields(known)]
    watched = Watched(**{name: getattr(known, name) for name in fields})
    return attack._run(scene.transcript, watched, VICTIM, generator(0), lambda *_: None)
