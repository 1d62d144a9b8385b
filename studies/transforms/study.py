"""Whose images claims are under augmentation, whatever the transform, and a table of docs/studies/defenses.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchvision.transforms.v2.functional import rotate

from adversaries.inversion.maximum_a_posteriori import MaximumAPosteriori
from clients.defenses.augmentation import Augmentation
from fedsim.audit.audit import open_audit
from fedsim.audit.evaluation.matches import Pool
from fedsim.audit.evaluation.statistics import mean_and_margin
from fedsim.base import metrics
from fedsim.base.randomness import generator
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.attack import Target
from fedsim.interfaces.defense import copy_with_facts
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.knowledge import Knowledge
from studies.running import Row
from studies.trust.study import VICTIMS, case_tables, count_victims, record_case
from studies.writing import group_rows, markdown_table

TURNS = (-30, -15, 0, 15, 30)
SCORES = {"plain": "identified as they are", "turned": "in any transform", "other": "another client's claims, likewise"}
Rows = Sequence[Mapping[str, str]]


def measure(case: str, seed: int, public: str) -> list[Row]:
    """Attack the victims of a case by `map`, which knows the defense.

    Returns:
        For each victim the share of its images that are identified, as they are and in any transform that the
        defense may have made; `chance` is the share that as many matches hit by chance, and `other` what the claims of
        the next victim identify.
    """
    run = record_case(case, seed)
    tables = {"adversary": case_tables(case, seed)[1], "attack": [{"name": "map"}]}
    audit = open_audit(run.path, validate_tables(AttackFile, tables, case), trust=True)
    knowledge = audit.granted_knowledge
    (defense,) = knowledge.defenses or ()
    assert isinstance(defense, Augmentation)
    if public == "augmented":
        knowledge = augment_public(knowledge, defense)
    attack = MaximumAPosteriori(draws=0).adaptive_copy("map adaptive")
    claims = []
    for victim in VICTIMS:
        rng = generator("transforms", seed, victim)
        target = Target(transcript=audit.transcript, victim=victim, knowledge=knowledge, rng=rng)
        finding = attack.run(target)
        assert isinstance(finding, Reconstruction)
        claims.append(finding.data)
    rows = []
    for victim in VICTIMS:
        truth = audit.case.truth(victim, None)
        assert truth is not None
        pool = Pool.from_truth(truth, audit.case.public())
        assert pool is not None
        plain, _ = identify([claims[victim]], pool)
        turned, chance = identify(transform_claims(claims[victim], defense), pool)
        other, _ = identify(transform_claims(claims[(victim + 1) % len(VICTIMS)], defense), pool)
        rows.append({"victim": victim, "plain": plain, "turned": turned, "chance": chance, "other": other})
    return rows


def augment_public(knowledge: Knowledge, defense: Augmentation) -> Knowledge:
    """Return what is known, with public images as a client's batch would have them."""
    known, public = copy_with_facts(defense, value_range=knowledge.value_range), knowledge.auxiliary
    assert public is not None
    context: Any = SimpleNamespace(rng=generator("transforms", "public"))
    inputs, _ = known.on_batch(public.inputs, public.labels, context)
    return replace(knowledge, auxiliary=replace(public, inputs=inputs))


def transform_claims(claims: Tensor, defense: Augmentation) -> Iterator[Tensor]:
    """Yield claims, `example channel height width`, in each shift, mirrored where it may be, and turned."""
    side, width = claims.shape[-1], defense.padding
    turns, mirrors = TURNS if defense.transforms else (0,), (False, True) if defense.flip else (False,)
    for turn, is_mirrored in itertools.product(turns, mirrors):
        turned = rotate(claims, turn) if turn else claims
        padded = pad(turned.flip(-1) if is_mirrored else turned, [width] * 4)
        for down, right in itertools.product(range(2 * width + 1), repeat=2):
            yield padded[..., down : down + side, right : right + side]


def identify(variants: Iterator[Tensor] | Sequence[Tensor], pool: Pool) -> tuple[float, float]:
    """Return the share of the victim's examples that a claim is most like in some variant, and that by chance."""
    similarity = torch.tensor(-torch.inf)
    for claims in variants:
        similarity = torch.maximum(similarity, metrics.correlations(claims, pool.data))
    is_matched = torch.zeros(len(pool.data), dtype=torch.bool)
    is_matched[similarity.argmax(1)] = True
    return is_matched[pool.of_victim].double().mean().item(), pool.expected_share(is_matched)


def tables(rows: Rows) -> dict[str, str]:
    """Return a line for each strength and choice of public images."""
    lines = []
    for (case, public), of_cell in group_rows(rows, "case", "public").items():
        line = [case, public]
        for name in SCORES:
            mean, margin = mean_and_margin({(row["seed"], row["victim"]): 100 * float(row[name]) for row in of_cell})
            line.append(f"{mean:.0f} ± {margin:.0f}")
        lines.append([*line, count_victims(of_cell)])
    head = ["defense", "public images", *(f"{text}, %" for text in SCORES.values()), "victims"]
    return {"": markdown_table(head, lines)}
