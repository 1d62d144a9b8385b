"""One self-contained page about a run: what leaked, under which threat model, beside accuracy.

It is written from whatever the run folder holds; a bare recording will do.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fedsim.auditing.audit import Audit
from fedsim.defense import NO_GUARANTEE, Defense, Participation, overrides
from fedsim.errors import ConfigError, FedsimError
from fedsim.evaluation.empirical_epsilon import written
from fedsim.evaluation.texts import TEXTS, WORDS
from fedsim.experiments.build import Experiment
from fedsim.experiments.config import Config, PluginTable, SecureAggregationTable
from fedsim.experiments.integrity import held_against_manifest
from fedsim.experiments.run_folder import RunFolder, exposures, measurements, read_rows, refusals, spendings
from fedsim.experiments.secure_aggregation import SENT_MASKED
from fedsim.files import write_text
from fedsim.privacy.ledger import Spent, counted, delta_of, labels, most_spent, spent, told
from fedsim.recording.manifest import read as read_manifest
from fedsim.reporting import adaptive, exposure, image_scores, tensorboard
from fedsim.reporting.again import made_again
from fedsim.reporting.cards import cards, chosen, places
from fedsim.reporting.charts import Look
from fedsim.reporting.citations import bibtex, papers
from fedsim.reporting.curves import Charts, attack_charts, called, epsilons, training_charts
from fedsim.reporting.evidence import (
    Found,
    Recording,
    attack_classes,
    kinds,
    own_audit,
    read_findings,
    read_recording,
    scored,
)
from fedsim.reporting.free_settings import free_settings
from fedsim.reporting.html import grouped, page
from fedsim.reporting.image_scores import CLOSENESS
from fedsim.reporting.memberships import roc_charts
from fedsim.reporting.pictures import Gallery
from fedsim.reporting.sharing import Sharing, sharing
from fedsim.reporting.summary import FEWEST, Line, headline, lines, listed, metric_name, most_victims
from fedsim.reporting.threats import Threat, threats
from fedsim.table_metrics import ROUNDING, TOLERANCE

log = logging.getLogger(__name__)

FINDINGS, ROUNDS = 12, 200
"""Most findings whose texts or records are shown, and most rounds listed."""
_NAMED = 6
_STEPPING = ("learning_rate", "momentum", "weight_decay", "label_smoothing")


def write_report(
    path: Path, audit: Audit | None = None, failures: list[str] | None = None, *, trust: bool = False
) -> Path:
    """Write `report.html` from what the run folder holds, and a PNG beside each finding.

    Args:
        path: the run folder.
        audit: who attacked, and where the truth is; by default the run's own experiment says so.
        failures: gets a sentence for each damaged round and each finding that cannot be shown; the page has the others.
        trust: import code that the run folder names.

    Raises:
        ConfigError: the folder holds neither an experiment nor a recording, or names code and is not trusted; or event
            files are wanted, and the package that writes them is not installed.
        RunError: the folder cannot be written.
    """
    folder, notes = RunFolder(path), list[str]()
    if not folder.experiment.is_file() and not folder.transcript.is_dir():
        raise ConfigError(f"{path}: holds no run; expected {folder.experiment.name} or transcript/ in it")
    failures = [] if failures is None else failures
    audit = audit or own_audit(folder, notes, failures, trust=trust)
    specs = [audit.spec, *([audit.experiment.config] if audit.experiment else [])] if audit else []
    tensorboard.check_installed(*specs)
    recording = read_recording(folder, notes)
    failures += [why for why in recording.damaged.values() if not any(why in told for told in failures)]
    audited = written(folder)
    failures += [item.sentence for item in audited if item.broken]
    known = kinds(folder, audit, trust=trust)
    scores = scored(folder)
    leaks, measured = lines(scores, known), measurements(folder)
    once = adaptive.told_once(leaks)
    of_examples, gallery = image_scores.with_sets(image_scores.read(folder), scores), Gallery()
    extremes = chosen(leaks, of_examples)
    found = read_findings(
        folder, audit, notes, failures, gallery=gallery, scores=of_examples, cut=places(extremes), trust=trust
    )
    notes += _not_made(folder, audit, found)
    attacks = attack_classes(audit, found, trust=trust)
    both = [pair for pair in adaptive.pairs(leaks) if pair.outcome]
    granted = threats(audit, found, attacks)
    html = page(
        "report.html.j2",
        scripts=["charts.js", "pictures.js", "tables.js"],
        name=path.resolve().name,
        path=path,
        facts=_facts(audit, recording, notes, failures) | {"Integrity": _integrity(path, notes, failures)},
        promises=_promises(folder, audit, found, notes),
        sharing=_sharing(audit, found),
        geometry=_geometry(folder),
        missing_updates=_missing_updates(recording),
        notes=notes,
        leaks={leak.summary.attack: [o for o in once if o.summary.attack == leak.summary.attack] for leak in once},
        fewest=FEWEST if most_victims(leaks) < FEWEST else 0,
        groups=any(item.about["members"] for item in found),
        headline=headline(leaks),
        pairs={
            pair.naive.summary.attack: [o for o in both if o.naive.summary.attack == pair.naive.summary.attack]
            for pair in both
        },
        remarks=worth_of_defenses(leaks, audit),
        accuracy=_final_accuracy(measured, audit),
        epsilon=_final_epsilon(measured),
        sums=recording.of_sums,
        epsilons=audited,
        exposure=exposure.beside(exposures(folder), leaks, scores, {m: k.name for m, k in known.items()}),
        inf=math.inf,
        threats=granted,
        truths=[item.victims for item in granted if item.granted and item.victims],
        made=_made(found),
        single=_single(found),
        found=found,
        cards=cards(leaks, found, extremes, of_examples),
        gallery=gallery,
        orders=_orders(gallery),
        absent=_absent(gallery, found, granted),
        read=_by_victim([item for item in found if item.texts]),
        listed_rows=_by_victim([item for item in found if item.rows]),
        tolerance=TOLERANCE,
        rounding=ROUNDING,
        most={"findings": FINDINGS, "texts": TEXTS, "words": WORDS, "rounds": ROUNDS},
        training=training_charts(measured),
        attacking=_attacking(attacks, found, leaks),
        memberships=roc_charts(found, attacks),
        recording=recording,
        traffic=_traffic(recording),
        own=audit is not None and audit.experiment is not None,
        again=(files := made_again(audit, recording, found)),
        identity=_identity(folder, audit, recording, files.hash),
        papers=(cited := papers(audit, attacks, recorded=bool(recording.headers))),
        bibliography="\n\n".join(bibtex(paper) for _, paper in cited),
    )
    write_text(folder.report, html)
    if tensorboard.is_wanted(*specs):
        tensorboard.write_events(folder)
    return folder.report


def _not_made(folder: RunFolder, audit: Audit | None, found: Sequence[Found]) -> list[str]:
    """A sentence for each attack that was refused, of this file or of one before, unless another file made it."""
    made = {item.about["attack"] for item in found}
    refused = refusals(folder)
    if audit is not None and (audit.spec.adversary.when != "never" or made):
        with suppress(FedsimError):  # what is granted cannot be told any more, as on a machine without the data
            refused |= audit.refused
    return [f"Not made: {why}." for title, why in refused.items() if title not in made]


def worth_of_defenses(found: Sequence[Line], audit: Audit | None) -> list[str]:
    """A sentence for each attack on clients that defend themselves, see `fedsim.reporting.adaptive.remarks`."""
    defended = audit is not None and audit.experiment is not None and bool(audit.experiment.config.defense)
    granted = audit is not None and audit.spec.adversary.knowledge.defenses is True
    return adaptive.remarks(found, defended=defended, granted=granted)


def _attacking(attacks: Mapping[str, Any], found: Sequence[Found], leaks: Sequence[Line]) -> Charts:
    """The curves of attacks; those of an adaptive attack that is the same as the naive one are drawn with it."""
    again = adaptive.same(leaks)
    alike = again | {naive: naive for naive in again.values()}
    names = {title: alike[title] + adaptive.BOTH if title in alike else title for title in attacks}
    curves = [(names[title], item.curves) for item in found if item.curves and (title := str(item.about["attack"]))]
    looks = {names[title]: Look(place) for place, title in enumerate(attacks) if names[title] in dict(curves)}
    scored_by = [(leak.summary.attack, leak.summary) for leak in leaks if leak.summary.metric == "psnr"]
    return attack_charts(curves, looks, {names[title]: item.floor for title, item in scored_by if title in names})


def _final_accuracy(rows: Sequence[Mapping[str, str]], audit: Audit | None = None) -> str:
    """What the recorded model is good for, out of `metrics.csv`, in a sentence; empty where nothing was evaluated.

    By the last evaluated round, on the public test set; where the server has no such figure, as the plain mean over
    clients, each on what it holds out.
    """
    most = audit.experiment.config.federation.evaluate_examples if audit and audit.experiment else None
    public = f"at most {most} examples of the public test set" if most else "the public test set"
    for name, unit in (("accuracy", ".1%"), ("loss", ".4g")):
        known = [row for row in rows if row.get(name)]
        last = max((int(row["round"]) for row in known), default=0)
        own = {row["client"]: float(row[name]) for row in known if int(row["round"]) == last}
        server = own.pop("server", None)
        if server is not None:
            return f"The model's final {name} on {public} is {server:{unit}} (after round {last})."
        if own:
            mean = float(np.mean(list(own.values())))
            whose = "what one client holds out" if len(own) == 1 else f"what {len(own)} clients hold out, on average,"
            return f"The model's final {name} on {whose} is {mean:{unit}} (after round {last})."
    return ""


def _final_epsilon(rows: Sequence[Mapping[str, str]]) -> str:
    """What the client that spent most has spent by the last round, in a sentence; empty where nothing is proved."""
    spent = [(row["round"], column, row[column]) for row in rows for column in epsilons(row) if row[column]]
    last = {column: f"{called(column)} is {float(value):.3g}" for _, column, value in spent}
    return f"The largest proved {listed(list(last.values()))} (after round {spent[-1][0]})." if last else ""


def _single(found: Sequence[Found]) -> tuple[str, str] | None:
    """What one example is called and where to look at it; None where no finding claims examples."""
    if any(item.pictured for item in found):
        return "image", "the pictures"
    if any(item.texts for item in found):
        return "text", "the texts"
    return ("example", "image-scores.csv") if any(item.images for item in found) else None


def _made(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Of each attack that found something: settings other than its defaults, what makes it again, its warnings."""
    attacks: dict[str, dict[str, Any]] = {}
    for item in found:
        changed = ", ".join(f"{key} = {value}" for key, value in sorted(item.about["changed"].items()))
        own = {
            "plugin": item.about["plugin"],
            "changed": changed,
            "knows_defenses": "defenses" in item.about["granted"],
            "command": item.about["command"],
            "warnings": {},
        }
        warnings = attacks.setdefault(str(item.about["attack"]), own)["warnings"]
        for warning in item.about["warnings"]:
            what = str(warning).partition(": ")[2] or str(warning)  # of whichever victim it was said
            warnings[what] = warnings.get(what, 0) + 1
    return [{"name": name} | own for name, own in attacks.items()]


def _facts(audit: Audit | None, recording: Recording, notes: list[str], failures: list[str]) -> dict[str, str]:
    """What was run: term to sentence."""
    if audit is None or audit.experiment is None:
        return _recorded_facts(recording)
    experiment, config = audit.experiment, audit.experiment.config
    partition, federation = config.partition, config.federation
    most = f", at most {partition.samples_per_client} examples each" if partition.samples_per_client else ""
    late = f", each a straggler with probability {p:g}" if (p := federation.straggler_probability) else ""
    held = f", {partition.test_fraction:.0%} held out for tests" if partition.test_fraction else ""
    facts = {
        "Data": _described(config.data),
        "Partition": _described(partition) + most + held,
        "Model": _described(config.model),
        "Federation": f"{federation.clients} clients, {federation.rounds} rounds{late}, {_described(config.strategy)}",
        "Local training": ", ".join(_local_training(config)),
        "Defenses": "" if config.defense else "none",
        "Settings that defend": "",
        "Secure aggregation": _secure(config.secure_aggregation),
        "Seed, engine": f"{federation.seed}, {federation.engine}",
    }
    try:
        data, shape = experiment.data.dataset, " × ".join(map(str, experiment.dataset.task.input_shape))
        axes = {"image": "channel × height × width", "table": "features", "text": "tokens"}[data.task.kind]
        goal = f"{data.num_classes} classes" if data.num_classes else "a regression"
        facts["Data"] += f": {shape} ({axes}), {goal}; {data.source}; {data.licence}"
        facts["Settings that defend"] = free_settings(experiment)
        facts["Model"] += f": {grouped(sum(p.numel() for p in experiment.model.parameters()))} parameters"
    except FedsimError as error:
        notes.append(f"Not everything about this run can be told: {error}.")
        failures.append(str(error))
    return facts


def _traffic(recording: Recording) -> str:
    """How many bytes clients sent; of sums over groups, how many these have."""
    replies = [reply for header in recording.headers for reply in header.replies]
    if not replies:
        return ""
    total, each = sum(recording.sent), sum(recording.sent) / len(replies)
    numbers = f", {each / recording.values:.3g} for each number of the state" if recording.values else ""
    of = ("The sums have", "sum") if recording.of_sums else ("Clients sent", "update")
    said = f"{of[0]} {grouped(total)} bytes, {grouped(round(each))} in each {of[1]} on average{numbers}."
    return f"{said} {SENT_MASKED[0].upper()}{SENT_MASKED[1:]}." if recording.of_sums else said


def _secure(table: SecureAggregationTable | None) -> str:
    """What the server sees of clients; nothing where it sees each of them."""
    if table is None:
        return ""
    size = "all clients of a round" if table.groups == "all" else f"{table.groups} clients or more, drawn in each round"
    return (
        f"sums over groups of {size}; each number cut at {table.clip:g} and rounded to {table.bits} bits, threshold "
        f"{table.threshold:g}"
    )


def _local_training(config: Config) -> list[str]:
    training = config.training
    batches = f"B = {training.batch_size}" + (", the same batches each epoch" if training.batches == "fixed" else "")
    if training.sends == "gradient":
        return ["none: clients send the gradient of one mini-batch a round", batches]
    epochs, steps = f"E = {training.local_epochs} local epochs", f"T = {training.local_steps} local steps"
    local = [epochs if training.local_epochs else steps, batches, training.optimizer]
    return local + [
        f"{key.replace('_', ' ')} {getattr(training, key):g}" for key in _STEPPING if getattr(training, key)
    ]


def _recorded_facts(recording: Recording) -> dict[str, str]:
    headers = recording.headers
    clients = {reply.client for header in headers for reply in header.replies}
    sent = headers[0].config.items() if headers else ()
    words = {"weights": "weights", "gradient": "gradients", "delta": "deltas"}
    kinds = {words[reply.kind] for header in headers for reply in header.replies}
    return {
        "Origin": "a recording without an experiment file, or with one that is not used, as of another Flower app",
        "Federation": f"{len(clients)} recorded clients, {len(headers)} readable rounds",
        "Model": f"{grouped(recording.values)} values in each message" if recording.values else "",
        "Clients sent": " and ".join(sorted(kinds, reverse=True)),
        "Sent along": ", ".join(f"{key} {value}" for key, value in sent if key != "server-round"),
    }


def _described(table: PluginTable) -> str:
    settings = ", ".join(f"{key} {value}" for key, value in table.settings.items())
    return f"{table.name} ({settings})" if settings else table.name


def _promises(folder: RunFolder, audit: Audit | None, found: Sequence[Found], notes: list[str]) -> list[str]:
    """What each defense promises, with what the privacy ledger says was spent: by all clients, and by the victims."""
    if audit is None or audit.experiment is None or not audit.experiment.config.defense:
        return []
    tables = audit.experiment.config.defense
    try:
        rows, defenses = spendings(folder), audit.experiment.defenses
        victims = sorted({int(str(item.about["victim"])) for item in found})
        return [
            f"{_described(table)}: {_promise(audit.experiment, defense, spent(rows, label), victims)}"
            for table, defense, label in zip(tables, defenses, labels([t.name for t in tables]), strict=True)
        ]
    except FedsimError as error:
        notes.append(f"Not everything about the defenses can be told: {error}.")
        return [_described(table) for table in tables]


def _sharing(audit: Audit | None, found: Sequence[Found]) -> Sharing | None:
    """Who holds what; None where nobody knows."""
    if audit is None or audit.experiment is None:
        return None
    attacked = {int(str(item.about["victim"])) for item in found}
    with suppress(FedsimError):  # the data set is missing, which a note says already
        return sharing(audit.experiment, attacked)
    return None


def _geometry(folder: RunFolder) -> dict[str, Any] | None:
    """What `fedsim geometry` wrote; None where nobody asked."""
    rows = read_rows(folder.geometry, ("round", "client"))
    if not rows:
        return None
    names = [name for name in rows[0] if name not in ("round", "client")]
    values = {name: [float(row[name]) for row in rows] for name in names}
    return {"count": len(rows), "rows": [(name, (fmean(own), min(own), max(own))) for name, own in values.items()]}


def _missing_updates(recording: Recording) -> str:
    """How often clients sent nothing, and which most often; empty where all sent something."""
    missing = Counter(client for header in recording.headers for client in header.failures)
    if not missing:
        return ""
    rounds = sum(bool(header.failures) for header in recording.headers)
    most = [f"client {client} in {counted(times)}" for client, times in missing.most_common(_NAMED)]
    others = len(missing) - len(most)
    more = f", and {others} more clients" if others > 0 else ""
    return (
        f"In {rounds} of {len(recording.headers)} rounds clients sent nothing, because they were late, failed "
        f"or chose silence: {', '.join(most)}{more}."
    )


def _by_victim(found: Sequence[Found]) -> list[list[Found]]:
    """Findings whose true examples are the same stand together; those without truth, and bags of words, alone."""
    groups: dict[tuple[object, ...], list[Found]] = {}
    for place, item in enumerate(found):
        same = item.known and not item.bag
        true = tuple(pair.true for pair in item.texts) + tuple(map(tuple, item.rows.true if item.rows else ()))
        where = (item.about["who"], item.about["round"], true)
        groups.setdefault(where if same else (place,), []).append(item)
    return list(groups.values())


def _absent(gallery: Gallery, found: Sequence[Found], granted: Sequence[Threat]) -> set[str]:
    """Which parts the page does not have."""
    parts = {
        "pictures": bool(gallery.grids),
        "texts": any(item.texts for item in found),
        "records": any(item.rows for item in found),
        "memberships": any(item.roc for item in found),
        "threats": bool(granted),
    }
    return {name for name, there in parts.items() if not there}


def _orders(gallery: Gallery) -> list[tuple[str, str]]:
    """The metrics by which images can be sorted, and their names."""
    known = {metric for grid in gallery.grids.values() for metric in grid.scores}
    return [(name.replace("_", "-"), metric_name(name).partition(",")[0]) for name in CLOSENESS if name in known]


def _promise(
    experiment: Experiment, defense: Defense, clients: Mapping[int, Spent], victims: Sequence[int] = ()
) -> str:
    """In figures where the ledger has them, otherwise of the first client in all rounds."""
    most = most_spent(clients) if clients else None
    try:
        planned = experiment.setting.participation(most.client if most else 0)
    except FedsimError:  # the data set is missing, so nobody knows what clients hold
        planned = None
    done = most.participation if most else planned
    if done is None:
        return _promise_without_data(experiment, defense)
    # Its strength follows from [training], and stays if the strategy then asks for something else.
    own = defense.of_client(planned or replace(done, rounds=experiment.config.federation.rounds))
    proved = own.guarantee(replace(done, rounds=max(1, done.rounds)), delta_of(defense))
    if proved is None:
        return NO_GUARANTEE
    privacy = f"ε = {proved.epsilon:.3g}, δ = {proved.delta:g} after {counted(done.rounds)}"
    privacy = told(clients, victims) if clients else privacy
    return f"{privacy}; {proved.neighbours}; {proved.accountant}; N and metrics in clear"


def _promise_without_data(experiment: Experiment, defense: Defense) -> str:
    """Without figures; whether anything is proved does not depend on how much a client holds."""
    training = experiment.training
    some = Participation(num_examples=training.batch_size, batch_size=training.batch_size, steps=1, rounds=1)
    proved = overrides(defense, "guarantee") and defense.of_client(some).guarantee(some, delta_of(defense)) is not None
    return f"{defense.promise}; how much depends on what clients hold" if proved else NO_GUARANTEE


def _integrity(path: Path, notes: list[str], failures: list[str]) -> str:
    """Which run this is, and whether it is still what was written; what is not is a note and a failure, too."""
    verdict = held_against_manifest(path)
    if verdict.differences:
        notes.append(f"This is not the run that was written: {'; '.join(verdict.differences)}.")
        failures.append(f"{path}: is not the run that was written: {'; '.join(verdict.differences)}")
    return verdict.text


def _versions(folder: RunFolder) -> str:
    try:
        versions = json.loads((folder.path / "versions.json").read_text(encoding="utf-8"))
        return ", ".join(f"{name} {version}" for name, version in versions.items())
    except (OSError, ValueError, AttributeError):
        return ""


def _run_id(folder: RunFolder) -> str:
    with suppress(FedsimError):  # what was altered is told under Integrity
        manifest = read_manifest(folder.path)
        return manifest.run if manifest else ""
    return ""


def _identity(folder: RunFolder, audit: Audit | None, recording: Recording, claims: str) -> dict[str, str]:
    """What tells this run, and a run that is to be the same, from others."""
    own = audit.experiment if audit else None
    return {
        "Run": _run_id(folder),
        "Seed": str(own.config.federation.seed) if own else "",
        "Versions": _versions(folder),
        f"SHA-256 of the {'intact rounds' if recording.damaged else 'recording'}": recording.hash,
        "SHA-256 of all findings": claims,
    }
