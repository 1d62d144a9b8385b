"""What is proved of a run, what was measured of it, and what its model is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedsim.base.errors import FedsimError
from fedsim.dossier.contents import Accuracy, ExposedClient, MeasuredEpsilon, Proof, to_number
from fedsim.federation.app_ledger import prove_by_messages
from fedsim.federation.run_folder import read_exposures, read_ledger
from fedsim.interfaces.defense import Defense, Guarantee
from fedsim.privacy.distributed import DistributedPrivacy
from fedsim.privacy.ledger import PrivacySpending, largest_spender, spending_by_client, unique_labels
from fedsim.report.exposure import mean_quantities
from fedsim.report.headline import describe_accuracy as say_accuracy
from fedsim.report.reported_run import ReportedRun
from fedsim.report.run_facts import list_app_defenses, name_excepted_colluders, prove_guarantee, run_facts
from fedsim.report.summary import enumerate_words
from fedsim.report.sweep_answer import describe_epsilon


def collect_proofs(run: ReportedRun, setting: str = "") -> tuple[list[Proof], str]:
    """Return the guarantees of the clients' defenses, and why other defenses, or all, prove nothing.

    Epsilon is that of the ledger, for the client that spent most.
    """
    experiment = run.experiment
    if experiment is None and run.folder.app.is_file():
        return _collect_app_proofs(run, setting)
    if experiment is None:
        return [], "There are no known guarantees: it was recorded elsewhere, and its clients' defenses are unknown."
    tables = experiment.config.defense
    central = _CENTRAL if experiment.config.central_privacy is not None else ""
    if not tables and experiment.config.distributed_privacy is None:
        return [], f"No guarantee is proved, because clients have no defense.{central}"
    proofs: list[Proof] = []
    unproved: list[str] = []
    try:
        if experiment.distributed_privacy is not None:
            proofs.append(_prove_sums(run, experiment.distributed_privacy, setting))
        rows, defenses = read_ledger(run.folder), experiment.defenses
        for defense, label in zip(defenses, unique_labels([table.name for table in tables]), strict=True):
            clients = spending_by_client(rows, label)
            proof = prove_guarantee(experiment, defense, clients)
            guarantee, rounds = proof or (None, 0)
            if guarantee is None:
                unproved.append(label)
                continue
            proofs.append(_make_proof(defense, label, guarantee, clients, rounds, setting))
    except FedsimError as error:
        return [], f"The guarantees of the defenses are unknown: {error}."
    nothing = f"No guarantee is proved for {enumerate_words(unproved)}." if unproved else ""
    return proofs, f"{nothing}{central}".strip()


def _collect_app_proofs(run: ReportedRun, setting: str) -> tuple[list[Proof], str]:
    """Return what is proved of a Flower app by the number of messages of its clients."""
    proofs: list[Proof] = []
    try:
        rows = read_ledger(run.folder)
        for _, defense, label in list_app_defenses(run):
            clients = spending_by_client(rows, label)
            rounds = largest_spender(clients).rounds if clients else 0
            guarantee = prove_by_messages(defense, rounds) if clients else None
            if guarantee is not None:
                proofs.append(_make_proof(defense, label, guarantee, clients, rounds, setting))
    except FedsimError as error:
        return [], f"The guarantees of the defenses are unknown: {error}."
    if proofs:
        return proofs, ""
    named = run_facts(run).get("Defenses", "unknown")
    return [], f"No guarantee is proved for this Flower app; the defenses that fedsim put around its clients: {named}."


def _make_proof(
    defense: Defense,
    label: str,
    guarantee: Guarantee,
    clients: Mapping[int, PrivacySpending],
    rounds: int,
    setting: str,
) -> Proof:
    """Return what is proved of a client's own defense, with the epsilon of the client that spent most, if any did."""
    most = largest_spender(clients) if clients else None
    epsilon = most.epsilon if most else guarantee.epsilon
    return Proof(
        setting=setting,
        defense=label,
        epsilon=to_number(epsilon),
        delta=to_number(most.delta if most else guarantee.delta),
        neighbours=guarantee.neighbours,
        accountant=guarantee.accountant,
        client=most.client if most else None,
        rounds=rounds,
        against=defense.against,
        promise=describe_epsilon(epsilon),
    )


def _prove_sums(run: ReportedRun, privacy: DistributedPrivacy, setting: str) -> Proof:
    """Return what is proved of sums in which clients share the noise."""
    clients = spending_by_client(read_ledger(run.folder), privacy.name)
    most = largest_spender(clients) if clients else None
    epsilon = most.epsilon if most else 0.0
    exceptions = "".join(f"; not against {who}" for who in name_excepted_colluders(run, privacy))
    return Proof(
        setting=setting,
        defense=privacy.name,
        epsilon=to_number(epsilon),
        delta=to_number(privacy.delta),
        neighbours="the update of one client replaced by zeros",
        accountant="Rényi divergences of the Skellam mechanism (dp-accounting)",
        client=most.client if most else None,
        rounds=most.rounds if most else 0,
        against=f"the server and all who see the sums, if {privacy.shares} clients of each sum that do not work with "
        f"it add their noise{exceptions}",
        promise=describe_epsilon(epsilon),
    )


def collect_measured_epsilons(run: ReportedRun, setting: str = "") -> list[MeasuredEpsilon]:
    """Return the lower bounds of epsilon that canaries showed."""
    measured = []
    for audit in run.epsilon_audits:
        measured.append(
            MeasuredEpsilon(
                setting=setting,
                client=audit.client,
                defense=audit.defense,
                measured=to_number(audit.measured.epsilon),
                proved=to_number(audit.proved),
                delta=to_number(audit.delta),
                correct=audit.measured.correct,
                guesses=audit.measured.guesses,
                canaries=audit.measured.canaries,
                confidence=to_number(audit.confidence),
                uses_curve=audit.measured.uses_curve,
                is_broken=audit.is_broken,
            )
        )
    return measured


def collect_exposed_clients(run: ReportedRun) -> list[ExposedClient]:
    """Return for each quantity that clients measured of themselves the one that is exposed most."""
    exposed = []
    for quantity in mean_quantities(read_exposures(run.folder)):
        if quantity.ranking:
            who = quantity.ranking[0]
            exposed.append(
                ExposedClient(
                    quantity=quantity.title,
                    meaning=quantity.meaning,
                    client=who[0],
                    value=to_number(quantity.values[who]),
                    clients=len(quantity.values),
                )
            )
    return exposed


def describe_accuracy(run: ReportedRun) -> Accuracy:
    """Return what the model is worth, as far as the run or what clients of another's app reported says it."""
    sentence = say_accuracy(run.metrics, run.config, run.reported_accuracy)
    if run.reported_accuracy is not None:
        return Accuracy(
            sentence=sentence,
            accuracy=run.reported_accuracy.accuracy,
            guess=None,
            examples=run.reported_accuracy.examples or None,
            no_learning=run.no_learning.sentence,
        )
    evaluated = [row for row in run.metrics if row["client"] == "server" and row.get("accuracy")]
    last = evaluated[-1] if evaluated else {}
    count = _read_number(last.get("num_examples"))
    return Accuracy(
        sentence=sentence or "The model was not evaluated, so its accuracy is unknown.",
        accuracy=_read_number(last.get("accuracy")),
        guess=_read_number(last.get("guess")),
        examples=int(count) if count else None,
        no_learning=run.no_learning.sentence,
    )


def _read_number(text: str | None) -> float | None:
    value = float(text) if text else math.nan
    return value if math.isfinite(value) else None


def describe_proofs(proofs: Sequence[Proof]) -> list[str]:
    """Say in a sentence each what is proved."""
    sentences = []
    for proof in proofs:
        epsilon, delta = proof.epsilon, proof.delta
        if not isinstance(epsilon, float):
            sentences.append(f"{proof.defense} proves nothing about the client that spent most.")
            continue
        where = f" ({proof.setting})" if proof.setting not in ("", proof.defense) else ""
        sentences.append(
            f"Proved for {proof.defense}{where}: epsilon is at most {epsilon:.3g} with delta {delta:g}, for "
            f"{proof.neighbours}; an epsilon of this size gives {_PROTECTIONS[proof.promise]}."
        )
    return sentences


_CENTRAL = (
    " The models have central privacy, which protects against observers of the models alone, not against the server; "
    "ledger.csv has its epsilon."
)
_PROTECTIONS = {
    "strong": "strong protection",
    "weak": "weak protection",
    "hardly any": "hardly any protection",
    "none": "no protection",
}
"""What the words of `describe_epsilon` say within a sentence."""
