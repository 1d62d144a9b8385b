"""Facts about a run for its report: what was run, what defenses promise, what was sent and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedsim.base.errors import FedsimError, first_line, format_percent, number_of
from fedsim.federation.app_file import read_app_defenses
from fedsim.federation.app_ledger import IN_CLEAR, prove_by_messages
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import read_toml
from fedsim.federation.privacy_tables import SecureAggregationTable
from fedsim.federation.run_folder import read_ledger
from fedsim.federation.secure_aggregation import SENT_MASKED
from fedsim.federation.table import PluginTable
from fedsim.interfaces.defense import NO_GUARANTEE, Defense, Guarantee, Participation, overrides
from fedsim.modalities import find_modality
from fedsim.privacy.distributed import DistributedPrivacy
from fedsim.privacy.federation_privacy import FederationPrivacy
from fedsim.privacy.ledger import (
    PrivacySpending,
    describe_spending,
    largest_spender,
    spending_by_client,
    state_guarantee,
    unique_labels,
)
from fedsim.report.free_settings import free_settings
from fedsim.report.html import group_digits
from fedsim.report.recording_summary import Recording
from fedsim.report.reported_run import ReportedRun

_MAX_NAMED_CLIENTS = 6


_OPTIMIZER_SETTINGS = ("learning_rate", "momentum", "weight_decay", "label_smoothing")


def run_facts(run: ReportedRun) -> dict[str, str]:
    """Describe what was run, term by term; the run gets a note and a failure where the data set is not there."""
    experiment = run.experiment
    if experiment is None:
        app = _app_facts(run) if run.folder.app.is_file() else {}
        return {**recorded_facts(run.recording), **app}
    config = experiment.config
    partition, federation = config.partition, config.federation
    limit = f", at most {partition.samples_per_client} examples each" if partition.samples_per_client else ""
    stragglers = f", each a straggler with probability {p:g}" if (p := federation.straggler_probability) else ""
    held_out = f", {format_percent(share, '.0f')} held out for tests" if (share := partition.test_fraction) else ""
    strategy = _plugin_with_settings(config.strategy)
    facts = {
        "Data": _plugin_with_settings(config.data),
        "Partition": _plugin_with_settings(partition) + limit + held_out,
        "Model": _plugin_with_settings(config.model),
        "Federation": f"{federation.clients} clients, {federation.rounds} rounds{stragglers}, {strategy}",
        "Algorithm": _plugin_with_settings(config.algorithm) if config.algorithm else "",
        "Local training": ", ".join(local_training(config)),
        "Defenses": "" if config.defense else "none",
        "Settings that defend": "",
        "Secure aggregation": _secure_aggregation(config.secure_aggregation),
        "Client-level privacy": _federation_privacy(run, experiment),
        "Seed, engine": f"{federation.seed}, {federation.engine_table.name}",
    }
    # What follows is known only where the data set is there.
    try:
        data, shape = experiment.data.dataset, " × ".join(map(str, experiment.dataset.task.input_shape))
        axis_names = find_modality(data.task.modality).axes
        axes = " × ".join(axis_names) if len(axis_names) > 1 else f"{axis_names[0]}s"
        goal = data.task.describe_goal()
        if data.task.goal == "labels":
            goal += " (accuracy is the share of an example's labels that are right, on average)"
        if data.task.goal == "masks":
            goal += " (accuracy is the share of the pixels that are right)"
        facts["Data"] += f": {shape} ({axes}), {goal}; {data.source}; {data.licence}"
        facts["Settings that defend"] = free_settings(experiment)
        facts["Model"] += f": {group_digits(sum(p.numel() for p in experiment.model.parameters()))} parameters"
    except FedsimError as error:
        run.notes.append(f"Some facts about this run are unknown: {error}.")
        run.failures.append(str(error))
    return facts


def describe_setting(config: Config) -> str:
    """Return one line of what was run: data, model, clients and rounds, N at most, E or T, and B."""
    federation, limit = config.federation, config.partition.samples_per_client
    parts = [
        f"{config.data.name}, {config.model.name}",
        number_of(federation.clients, "client"),
        number_of(federation.rounds, "round"),
        f"N at most {limit}" if limit else "",
        config.algorithm.name if config.algorithm else "",
        *local_training(config)[:2],
        ", ".join(table.name for table in config.defense) or "no defense",
    ]
    return "; ".join(filter(None, parts))


def traffic_text(recording: Recording) -> str:
    """Say how many bytes clients sent; of sums over groups, how many these have."""
    replies = [reply for header in recording.headers for reply in header.replies]
    if not replies:
        return ""
    total = sum(recording.round_bytes)
    mean = total / len(replies)
    per_number = f", {mean / recording.num_values:.3g} for each number of the state" if recording.num_values else ""
    subject, unit = ("The sums have", "sum") if recording.holds_sums else ("Clients sent", "update")
    sentence = (
        f"{subject} {group_digits(total)} bytes, {group_digits(round(mean))} in each {unit} on average{per_number}."
    )
    if recording.holds_sums:
        return f"{sentence} {SENT_MASKED[0].upper()}{SENT_MASKED[1:]}."
    return sentence


def _secure_aggregation(table: SecureAggregationTable | None) -> str:
    """Say what the server sees of clients; empty where it sees each of them."""
    if table is None:
        return ""
    size = "all clients of a round" if table.groups == "all" else f"{table.groups} clients or more, drawn in each round"
    return (
        f"sums over groups of {size}; each number cut at {table.clip:g} and rounded to {table.bits} bits, threshold "
        f"{table.threshold:g}"
    )


def _federation_privacy(run: ReportedRun, experiment: Experiment) -> str:
    """Say what the server or the protocol promises to whom, and what was spent; empty where nothing is."""
    try:
        privacy = experiment.federation_privacy
        if privacy is None:
            return ""
        spending = spending_by_client(read_ledger(run.folder), privacy.name)
    except FedsimError as error:
        run.notes.append(f"The guarantee of the federation is unknown: {error}.")
        return ""
    spent = f"; {describe_spending(spending)}" if spending else ""
    exceptions = "".join(f"; it does not hold against {who}" for who in name_excepted_colluders(run, privacy))
    return f"{privacy.describe_strength()}{spent}; {privacy.describe()}{exceptions}"


def name_excepted_colluders(run: ReportedRun, privacy: FederationPrivacy) -> list[str]:
    """Name attackers who know so many shares of the noise of a sum that less is left than is accounted for."""
    if not isinstance(privacy, DistributedPrivacy):
        return []
    groups = [set(reply.senders) for header in run.recording.headers for reply in header.replies]
    names = []
    for role in run.other_attackers:
        colluders = set(role.colluders)
        if any(0 < len(group - colluders) < privacy.shares for group in groups if group & colluders):
            names.append(str(role))
    return names


def local_training(config: Config) -> list[str]:
    """Return the amount of local training, E or T, then B, and the settings of the optimizer."""
    training = config.training
    batches = f"B = {training.batch_size}" + (", the same batches each epoch" if training.batches == "fixed" else "")
    if training.sends == "gradient":
        return ["none: clients send the gradient of one mini-batch a round", batches]
    if training.local_epochs:
        amount = f"E = {training.local_epochs} local epochs"
    else:
        amount = f"T = {training.local_steps} local steps"
    settings = []
    for key in _OPTIMIZER_SETTINGS:
        if value := getattr(training, key):
            settings.append(f"{key.replace('_', ' ')} {value:g}")
    return [amount, batches, training.optimizer, *settings]


def recorded_facts(recording: Recording) -> dict[str, str]:
    """Describe a recording made elsewhere, term by term."""
    headers = recording.headers
    clients = {reply.client for header in headers for reply in header.replies}
    config = headers[0].config.items() if headers else ()
    words = {"weights": "weights", "gradient": "gradients", "delta": "deltas"}
    kinds_sent = {words[reply.kind] for header in headers for reply in header.replies}
    return {
        "Origin": "a recording without an experiment file that is used, such as that of another Flower app",
        "Federation": f"{len(clients)} recorded clients, {len(headers)} readable rounds",
        "Model": f"{group_digits(recording.num_values)} values in each message" if recording.num_values else "",
        "Clients sent": " and ".join(sorted(kinds_sent, reverse=True)),
        "Sent along": ", ".join(f"{key} {value}" for key, value in config if key != "server-round"),
    }


def _app_facts(run: ReportedRun) -> dict[str, str]:
    """Describe how a Flower app was run, term by term, by `app.toml` in the run folder."""
    try:
        tables = read_toml(run.folder.app)
        app, federation = tables["app"], tables["federation"]
        defenses = [PluginTable(**table) for table in tables.get("defense", [])]
        groups = tables.get("secure_aggregation")
        sums = None if groups is None else SecureAggregationTable(**groups)
        settings = ", ".join(f"{key} {value}" for key, value in tables.get("run_config", {}).items())
        note = "The app did not run to its end, so rounds may be missing."
        if not app["complete"] and note not in run.notes:
            run.notes.append(note)
        return {
            "Origin": "a Flower app, run by fedsim over clients in one process",
            "Flower app": f"{app['name']}, {federation['clients']} clients, flwr {app['flwr']}",
            "Settings of the app": settings,
            "Defenses": ", ".join(map(_plugin_with_settings, defenses)) or "none, except for those of the app itself",
            "Secure aggregation": _secure_aggregation(sums),
            "Seed": str(federation["seed"]),
        }
    except (FedsimError, KeyError, TypeError, ValueError) as error:
        run.notes.append(f"It is unknown how the app was run: {run.folder.app} is damaged ({first_line(error)}).")
        return {}


def _plugin_with_settings(table: PluginTable) -> str:
    settings = ", ".join(f"{key} {value}" for key, value in table.settings.items())
    return f"{table.name} ({settings})" if settings else table.name


def defense_promises(run: ReportedRun) -> list[str]:
    """Say what each defense promises, and what the ledger says was spent: by all clients, and by the victims."""
    experiment = run.experiment
    if experiment is None and run.folder.app.is_file():
        return _app_promises(run)
    tables = experiment.config.defense if experiment else []
    if experiment is None or not tables:
        return []
    try:
        rows, defenses = read_ledger(run.folder), experiment.defenses
        victims = sorted({int(str(finding.about["victim"])) for finding in run.findings})
        sentences = []
        labels = unique_labels([table.name for table in tables])
        for table, defense, label in zip(tables, defenses, labels, strict=True):
            promise = _promise(experiment, defense, spending_by_client(rows, label), victims)
            sentences.append(f"{_plugin_with_settings(table)}: {promise}")
        return sentences
    except FedsimError as error:
        run.notes.append(f"Some facts about the defenses are unknown: {error}.")
        return [_plugin_with_settings(table) for table in tables]


def list_app_defenses(run: ReportedRun) -> list[tuple[PluginTable, Defense, str]]:
    """Return the defenses that fedsim put around the clients of an app: table, defense, and label in the ledger."""
    tables = [PluginTable(**table) for table in read_toml(run.folder.app).get("defense", [])]
    defenses = read_app_defenses(run.folder.app, trust=run.trust)
    return list(zip(tables, defenses, unique_labels([table.name for table in tables]), strict=True))


def _app_promises(run: ReportedRun) -> list[str]:
    """Say what the defenses around the clients of an app promise by the number of their messages."""
    try:
        rows = read_ledger(run.folder)
        victims = sorted({int(str(finding.about["victim"])) for finding in run.findings})
        sentences = []
        for table, defense, label in list_app_defenses(run):
            clients = spending_by_client(rows, label)
            proved = prove_by_messages(defense, largest_spender(clients).rounds) if clients else None
            promise = "the number of messages alone gives no guarantee"
            if proved is not None:
                spending = describe_spending(clients, victims)
                promise = f"{spending}; {proved.neighbours}; {proved.accountant}; {IN_CLEAR} in the clear"
            sentences.append(f"{_plugin_with_settings(table)}: {promise}")
        return sentences
    except (FedsimError, ValueError, TypeError) as error:
        run.notes.append(f"Some facts about the defenses are unknown: {first_line(error)}.")
        return []


def missing_updates_text(recording: Recording) -> str:
    """Say how often clients sent nothing, and which most often; empty where all sent something."""
    missing = Counter(client for header in recording.headers for client in header.failures)
    if not missing:
        return ""
    rounds = sum(bool(header.failures) for header in recording.headers)
    most_often = [
        f"client {client} in {number_of(times, 'round')}" for client, times in missing.most_common(_MAX_NAMED_CLIENTS)
    ]
    num_others = len(missing) - len(most_often)
    more_clients = f", and {num_others} more clients" if num_others > 0 else ""
    return (
        f"In {rounds} of {len(recording.headers)} rounds clients sent nothing, because they were late, failed "
        f"or withheld their update: {', '.join(most_often)}{more_clients}."
    )


def _promise(
    experiment: Experiment, defense: Defense, clients: Mapping[int, PrivacySpending], victims: Sequence[int]
) -> str:
    """Say what a defense promises: what the ledger says was spent, or else what the first client would spend."""
    proof = prove_guarantee(experiment, defense, clients)
    if proof is None:
        return _promise_without_data(experiment, defense)
    proved, rounds = proof
    if proved is None:
        return NO_GUARANTEE
    privacy = f"ε = {proved.epsilon:.3g}, δ = {proved.delta:g} after {number_of(rounds, 'round')}"
    privacy = describe_spending(clients, victims) if clients else privacy
    return f"{privacy}; {proved.neighbours}; {proved.accountant}; N and metrics in the clear"


def prove_guarantee(
    experiment: Experiment, defense: Defense, clients: Mapping[int, PrivacySpending]
) -> tuple[Guarantee | None, int] | None:
    """Return what a defense guarantees the client that spent most, or else the first one, and its number of rounds.

    The guarantee is None where the defense proves nothing; all is None if it is unknown what
    clients hold.

    Args:
        clients: what each client has spent by this defense, from the ledger.
    """
    most = largest_spender(clients) if clients else None
    try:
        planned = experiment.setting.participation(most.client if most else 0)
    except FedsimError:  # the data set is missing, so the data of clients are unknown
        planned = None
    participation = most.participation if most else planned
    if participation is None:
        return None
    # Its strength follows from [training], and stays if the strategy then asks for something else.
    strength_basis = planned or replace(participation, rounds=experiment.config.federation.rounds)
    proved = state_guarantee(
        defense.of_client(strength_basis), [replace(participation, rounds=max(1, participation.rounds))]
    )
    return proved, participation.rounds


def _promise_without_data(experiment: Experiment, defense: Defense) -> str:
    """Say what a defense promises without figures.

    Whether it proves anything does not depend on how much a client holds.
    """
    training = experiment.training
    participation = Participation(num_examples=training.batch_size, batch_size=training.batch_size, steps=1, rounds=1)
    proved = (
        overrides(defense, "guarantee")
        and state_guarantee(defense.of_client(participation), [participation]) is not None
    )
    return f"{defense.promise}; how much depends on the data of the clients" if proved else NO_GUARANTEE
