"""Read a cell's table rows from its run folder: scores, accuracy, epsilon, bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedsim.audit.evaluation.empirical_epsilon import read_epsilons
from fedsim.audit.finding_files import read_facts
from fedsim.audit.plan import ADAPTIVE, AttackJob
from fedsim.audit.scores import SCORE_COLUMNS, read_score_rows
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import RunFolder, is_of_shared_model, read_ledger, read_metrics
from fedsim.privacy.ledger import is_central, is_shared_noise, spending_by_client
from fedsim.recording.adversary_role import AdversaryRole
from fedsim.recording.messages import MESSAGES_FOLDER
from fedsim.recording.reported_accuracy import read_reported_accuracy
from fedsim.recording.transcript import Transcript

_JOB_COLUMNS = ("attack", "victim", "round", "repeat")
_COPIED_COLUMNS = ("victim", "round", "repeat", "metric", "floor_guess", "examples", "doubt")
_NUMBER_COLUMNS = ("value", "floor", "ceiling")
_SERVER = AdversaryRole("server")


def sweep_rows(
    folder: OpenRun,
    title: str,
    planned: Iterable[AttackJob],
    variants: Mapping[str, str] | None = None,
    role: AdversaryRole = _SERVER,
) -> list[dict[str, str]]:
    """Return an attack's rows of `sweep.csv`, without the columns of the grid point and `run`.

    Args:
        planned: planned attacks; those without a score have a row without a metric.
        variants: by title the variant whose scores these are, where the run may have findings of earlier settings.
        role: who attacks, against whom epsilons are proved.
    """
    federation = {**_final_accuracy(folder), "bytes": _mean_bytes(folder.recording)}
    proved, measured = _proved_epsilons(folder, role), _measured_epsilons(folder)
    accuracies = _last_accuracies(folder)
    seconds = _attack_seconds(folder)
    scored = read_score_rows(folder.scores)
    if variants is not None:
        scored = [row for row in scored if row["variant"] == variants.get(row["attack"])]
    rows = []
    for row in [*scored, *_rows_without_score(scored, planned)]:
        if row["attack"] not in (title, f"{title} {ADAPTIVE}"):
            continue
        victim = row["victim"]
        rows.append(
            {
                "knows_defenses": str(int(row["attack"] != title)),
                **{name: row[name] for name in _COPIED_COLUMNS},
                **{name: _clear_nan(row[name]) for name in _NUMBER_COLUMNS},
                "better": {"True": "higher", "False": "lower"}.get(row["higher_is_better"], ""),
                "client_accuracy": accuracies.get(victim, ""),
                "proved_epsilon": proved.get(victim, ""),
                "measured_epsilon": measured.get(victim, ""),
                "seconds": seconds.get(_job_key(row), ""),
                **federation,
            }
        )
    return rows


def _rows_without_score(scored: Iterable[Mapping[str, str]], planned: Iterable[AttackJob]) -> Iterator[dict[str, str]]:
    """Yield a row of `scores.csv` for each job that failed or whose finding could not be scored."""
    scored_jobs = {_job_key(row) for row in scored}
    for job in planned:
        values = (job.title, str(job.victim), job.round, str(job.repeat))
        columns = dict(zip(_JOB_COLUMNS, values, strict=True))
        if _job_key(columns) not in scored_jobs:
            yield dict.fromkeys(SCORE_COLUMNS, "") | columns


def _job_key(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in _JOB_COLUMNS)


def _clear_nan(text: str) -> str:
    """Return the text of a number, or '' for NaN."""
    return "" if not text or math.isnan(float(text)) else text


def _final_accuracy(folder: RunFolder) -> dict[str, str]:
    """Return the accuracy of the global model at its last evaluation, what a guess gets, and the number of examples."""
    for row in reversed(read_metrics(folder)):
        if is_of_shared_model(row) and _clear_nan(row["accuracy"]):
            return {"accuracy": row["accuracy"], "guess": row.get("guess", ""), "num_evaluated": row["num_examples"]}
    reported = read_reported_accuracy(folder.path / MESSAGES_FOLDER) if folder.app.is_file() else None
    if reported is not None:  # by the clients of a Flower app
        count = str(reported.examples) if reported.examples else ""
        return {"accuracy": str(reported.accuracy), "guess": "", "num_evaluated": count}
    return {"accuracy": "", "guess": "", "num_evaluated": ""}


def _last_accuracies(folder: RunFolder) -> dict[str, str]:
    """Return the accuracy by client in the last evaluation; clients that only earlier ones asked have none."""
    rows = [row for row in read_metrics(folder) if _clear_nan(row["accuracy"])]
    return {row["client"]: row["accuracy"] for row in rows if row["round"] == rows[-1]["round"]}


def _mean_bytes(transcript: Transcript) -> str:
    """Return the mean size of a client's message in a round, if the server sees single clients."""
    sizes: list[int] = []
    for number in transcript.rounds:
        single_clients = [reply.client for reply in transcript.header(number).replies if not reply.members]
        if single_clients:
            client_sizes = transcript.upload_sizes(number)
            sizes += [client_sizes[client] for client in single_clients]
    return str(sum(sizes) / len(sizes)) if sizes else ""


def _proved_epsilons(folder: RunFolder, role: AdversaryRole = _SERVER) -> dict[str, str]:
    """Return by client the smallest epsilon that one of its defenses proves against who attacks.

    What a trusted server adds is left out, and against clients that attack the noise of which they know their shares.
    """
    rows = [row for row in read_ledger(folder) if not is_central(row) and not (role.colluders and is_shared_noise(row))]
    epsilons: dict[str, float] = {}
    for defense in dict.fromkeys(row["defense"] for row in rows):
        for client, loss in spending_by_client(rows, defense).items():
            epsilons[str(client)] = min(epsilons.get(str(client), math.inf), loss.epsilon)
    return {client: str(epsilon) for client, epsilon in epsilons.items()}


def _measured_epsilons(folder: RunFolder) -> dict[str, str]:
    """Return by client the largest epsilon that was measured for one of its defenses."""
    epsilons: dict[str, float] = {}
    for audit in read_epsilons(folder):
        if audit.client is None:  # of whoever sees the models alone, which no row of a client is about
            continue
        client = str(audit.client)
        epsilons[client] = max(epsilons.get(client, 0.0), audit.measured.epsilon)
    return {client: str(epsilon) for client, epsilon in epsilons.items()}


def _attack_seconds(folder: RunFolder) -> Mapping[tuple[str, ...], str]:
    """Return the duration of each attack by attack, victim, round and repeat."""
    seconds: dict[tuple[str, ...], str] = {}
    for path in folder.findings.glob("*/*.safetensors"):
        about: Mapping[str, Any] = read_facts(path)
        seconds[tuple(str(about[key]) for key in _JOB_COLUMNS)] = str(about["seconds"])
    return seconds
