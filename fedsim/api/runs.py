"""A run in Python: `fedsim.run` makes one, `fedsim.open` reads one, and both return a `Run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.api import pipeline
from fedsim.api.adversaries import Adversary, read_adversary
from fedsim.api.arguments import as_path, check_changes, read_tables
from fedsim.api.frames import read_frame, read_summary
from fedsim.api.objects import replace_objects
from fedsim.api.single_attack import make_finding, single_attack_file
from fedsim.audit.audit import Audit, make_audit
from fedsim.audit.evaluation.empirical_epsilon import COLUMNS as EPSILON_COLUMNS
from fedsim.audit.evaluation.empirical_epsilon import read_epsilons
from fedsim.audit.finding_files import load_claim
from fedsim.audit.plan import AttackJob
from fedsim.audit.scores import SCORE_COLUMNS
from fedsim.base.errors import ConfigError, FedsimError, RunError, format_percent, name_rounds, number_of
from fedsim.base.progress import ProgressListener, listen_to_progress
from fedsim.base.randomness import serialize_calls
from fedsim.exposure.of_clients import COLUMNS as EXPOSURE_COLUMNS
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.experiment_file import config_of, set_value
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import (
    METRICS_COLUMNS,
    RunFolder,
    default_folder,
    read_exposures,
    read_ledger,
    read_metrics,
    read_rows,
)
from fedsim.federation.trust import check_trust, is_in_run_folder
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.findings import Finding
from fedsim.plugins.frozen import to_plain_value
from fedsim.plugins.inline import is_lost_object
from fedsim.privacy.ledger import COLUMNS as LEDGER_COLUMNS
from fedsim.recording.adversary_role import CompanyName, PartyName
from fedsim.recording.messages import MESSAGES_FOLDER as MESSAGES
from fedsim.recording.messages import RecordedExchange, read_messages
from fedsim.recording.recording_folder import find_run
from fedsim.recording.transcript import Transcript
from fedsim.report.page import write_report

if TYPE_CHECKING:
    import pandas as pd  # at run time where a frame is made, as it takes a third of a second


@serialize_calls
def run(
    experiment: str | Path | Mapping[str, Any] | Config,
    out: str | Path | None = None,
    *,
    set: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    trust: bool = False,
    progress: ProgressListener | None = None,
) -> Run:
    """Run a federation under a curious server, attack what it saw, and report.

    Args:
        experiment: an experiment file, its tables as a dict, or a `Config`. In the dict, an object may stand in the
            place of a table: a network, a `Dataset`, a Flower strategy, a defense, an attack.
        out: the run folder; `runs/NAME` by default for a file `NAME.toml`.
        set: settings to change, such as `{"federation.rounds": 3}`.
        overwrite: replace an earlier run in the folder.
        trust: import code that a file in a run folder names.
        progress: called as `progress(what, done, total)`.

    Raises:
        FedsimError: the experiment is not valid, and nothing was started; or the run or an attack failed, and
            everything that was computed before is kept in the folder.
    """
    tables, where, folder = read_tables(experiment)
    for key, value in check_changes({} if set is None else set):
        set_value(tables, key, value, f"set {key}")
    replace_objects(tables)
    config = config_of(tables, where, folder)
    if isinstance(experiment, str | Path):
        check_trust(config, Path(experiment), trust or not is_in_run_folder(Path(experiment)))
    # Choose the folder, and run.
    if out is None and not isinstance(experiment, str | Path):
        raise ConfigError("out: an experiment that is in no file has no name; name the run folder")
    run_folder = OpenRun(default_folder(Path(str(experiment))) if out is None else as_path(out, "out"))
    with listen_to_progress(progress):
        done = pipeline.run(config, run_folder, overwrite=overwrite, follow=follow_with(progress))
    raise_failures(done)
    return Run(run_folder.path, trust=True)


def open(path: str | Path, *, file: str | Path | None = None, trust: bool = False) -> Run:
    """Return the run, or the recording of a Flower app, in the folder `path`.

    Args:
        path: the run folder, or one in which a Flower app recorded a single run.
        file: an attack file, which says what an adversary of this recording knows, and which files hold the truth.
        trust: import code that the run folder names.

    Raises:
        ConfigError: there is no run in the folder, or the attack file is not valid.
    """
    folder = RunFolder(find_run(as_path(path, "open")))
    folder.check_exists()
    folder.check_kinds()
    folder.check_holds_run()
    return Run(folder.path, file=None if file is None else as_path(file, "file"), trust=trust)


class Run:
    """A run folder.

    Each property reads its files anew, and raises RunError or TranscriptError where one is missing, damaged or not
    what the run wrote.
    """

    def __init__(
        self, path: Path, *, file: Path | None = None, adversary: Adversary | None = None, trust: bool = False
    ) -> None:
        self._folder = RunFolder(path)
        self._trust = trust
        self._file = read_adversary(OpenRun(path), file, trust=trust) if file is not None else adversary or Adversary()

    def __repr__(self) -> str:
        return f"Run({', '.join([repr(str(self.path)), *self._describe_contents()])})"

    def _describe_contents(self) -> list[str]:
        """Return in a few words what the folder holds, as far as it can be read."""
        facts = []
        with suppress(FedsimError):
            facts.append(number_of(len(self.transcript.rounds), "recorded round"))
        findings = Counter(path.parent.name for path in self._folder.findings.glob("*/*.safetensors"))
        facts += [f"{number_of(count, 'finding')} of {attack}" for attack, count in sorted(findings.items())]
        with suppress(FedsimError):
            for row in [row for row in read_metrics(self._folder) if row["client"] == "server"][-1:]:
                whose = {"shared": " of the shared model", "personal": " of the clients' own models"}
                if row["accuracy"]:
                    accuracy = format_percent(float(row["accuracy"]))
                    facts.append(f"accuracy {accuracy}{whose.get(row.get('model', ''), '')}")
        return facts

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._folder.path

    @property
    def transcript(self) -> Transcript:
        """Recording of the curious server; updates recorded by recipe are computed when they are read."""
        folder = OpenRun(self.path)
        if self._trust:
            folder.trust_code()
        return folder.recording

    @property
    def messages(self) -> list[RecordedExchange]:
        """Messages of a Flower app apart from updates: evaluations, queries, what came with updates; often none."""
        return list(read_messages(self.path / MESSAGES))

    @property
    def metrics(self) -> pd.DataFrame:
        """Accuracy and loss of the server and of each client, a row for each round; empty for a recording alone."""
        return read_frame(self._folder, self._folder.metrics, read_metrics, ("client",), METRICS_COLUMNS)

    @property
    def ledger(self) -> pd.DataFrame:
        """Steps of each client in each round and the privacy it has spent; empty where no defense proves anything."""
        return read_frame(self._folder, self._folder.ledger, read_ledger, ("defense",), LEDGER_COLUMNS)

    @property
    def exposure(self) -> pd.DataFrame:
        """Exposure of clients before they sent, a row for each value or failure; empty without `[[measure]]`."""
        path, texts = self._folder.exposure, ("state", "measure", "quantity", "failure")
        return read_frame(self._folder, path, read_exposures, texts, EXPOSURE_COLUMNS)

    @property
    def epsilons(self) -> pd.DataFrame:
        """Proved and measured epsilon, a row for each client with canaries and defense; empty without canaries."""
        return read_frame(self._folder, self._folder.epsilons, read_epsilons, ("defense",), EPSILON_COLUMNS)

    @property
    def scores(self) -> pd.DataFrame:
        """Scores of findings, a row for each attack, victim, round, repeat and metric; empty if none is scored."""
        path = self._folder.scores

        def check(folder: RunFolder) -> object:
            return read_rows(path, ("attack", "metric"), ("value", "floor"))

        return read_frame(self._folder, path, check, ("round",), SCORE_COLUMNS)

    def summary(self) -> pd.DataFrame:
        """Return the verdicts, as in the report: a row for each attack and metric, its main metric first.

        The columns are `attack`, `metric`, its mean `value`, the 95 % interval from `low` to `high`, the mean `floor`,
        the number of `victims`, and the `verdict` with `why` it is so. An attack that failed on victims has a row of
        its own, without a metric. Empty if nothing is scored and nothing failed.
        """
        return read_summary(self._folder, self.scores, trust=self._trust)

    @property
    def findings(self) -> list[AttackFinding]:
        """Findings of all attacks."""
        folder = OpenRun(self.path)
        folder.check_exists()
        return [_read_finding(folder, path) for path in sorted(folder.findings.glob("*/*.safetensors"))]

    @serialize_calls
    def attack(
        self,
        attack: str | Attack,
        *,
        victim: int | None = None,
        round: int | Sequence[int] | None = None,
        knowledge: Mapping[str, Any] | None = None,
        who: PartyName | Sequence[int | CompanyName] | None = None,
        progress: ProgressListener | None = None,
        **settings: Any,
    ) -> Finding:
        """Attack one client, score what was found, and keep it like any other finding.

        Args:
            attack: a registered name, `module:Class`, or an instance of a frozen dataclass that derives from `Attack`.
            victim: id of the client; by default the one that the run's file names first, or the first recorded one.
            round: which round, or rounds for an attack on several; by default as the run's file says.
            knowledge: facts to grant or to withhold, by the keys of `[adversary.knowledge]`.
            who: attacks, as `adversary.who` in the experiment file; by default as the run's file says.
            progress: called as `progress(what, done, total)`.
            **settings: of the attack.

        Raises:
            FedsimError: the request is wrong and nothing was attacked, or the attack failed.
        """
        rounds = None
        if round is not None:
            rounds = list(map(to_plain_value, round)) if isinstance(round, Iterable) else [to_plain_value(round)]
        folder = OpenRun(self.path)
        base = self._base_adversary(folder)
        spec = single_attack_file(
            base,
            folder.recording,
            attack,
            victim=to_plain_value(victim),
            rounds=rounds,
            knowledge=knowledge or {},
            who=to_plain_value(who),
            settings=settings,
        )
        # The command that each finding keeps.
        keywords = {
            "victim": to_plain_value(victim),
            "round": to_plain_value(round),
            "knowledge": knowledge or None,
            "who": to_plain_value(who),
            **settings,
        }
        arguments = [repr(spec.attack[-1].name)]
        arguments += [f"{key}={value!r}" for key, value in keywords.items() if value is not None]
        adversary = Adversary(spec=spec, beside=self._file.beside, command=f"run.attack({', '.join(arguments)})")
        with listen_to_progress(progress):
            finding, _ = make_finding(folder, base, adversary, trust=self._trust, follow=follow_with(progress))
        return finding

    @serialize_calls
    def resume(self, *, progress: ProgressListener | None = None) -> Run:
        """Resume the run where it was interrupted, make the attacks that are not made yet, and report.

        Raises:
            FedsimError: there is nothing to resume, or it failed; what was computed before is kept.
        """
        with listen_to_progress(progress):
            done = pipeline.resume(OpenRun(self.path), trust=self._trust, follow=follow_with(progress))
        raise_failures(done)
        return self

    @serialize_calls
    def report(self) -> Report:
        """Write `report.html` anew; the value shows it in a notebook."""
        failures: list[str] = []
        folder = OpenRun(self.path)
        with folder.hold_lock():
            audit = self._audit(folder)
            return Report(write_report(folder, audit, failures, trust=self._trust), tuple(failures))

    def _audit(self, folder: OpenRun) -> Audit | None:
        """Return the audit that the run's file describes; None where there is none, and the page says why."""
        try:
            base = self._base_adversary(folder)
        except ConfigError:
            return None
        available = [table for table in base.attack if not is_lost_object(table.name)]
        spec = base.model_copy(update={"attack": available})
        return make_audit(folder, spec, self._file.beside, trust=self._trust) if available else None

    def _base_adversary(self, folder: OpenRun) -> AttackFile:
        """Return the adversary of the attack file, or of the run's own experiment."""
        if self._file.spec is not None:
            return self._file.spec
        return folder.read_experiment(trust=self._trust) or AttackFile()


@dataclass(frozen=True, kw_only=True)
class AttackFinding:
    """Finding with the client that it is about.

    Attributes:
        attack: its title.
        victim: the client that was attacked.
        round: the round; `1-3+7` or `1-5 by 2` for an attack on several.
        repeat: which of several random starts, from 0.
        finding: what the attack claims.
        about: everything else that is saved with it: settings, what was granted, seconds.
    """

    attack: str
    victim: int
    round: str
    repeat: int
    finding: Finding
    about: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Report:
    """Report that was written.

    Attributes:
        path: the page.
        failures: one sentence for each damaged round, and each finding that the page cannot show.
    """

    path: Path
    failures: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        complaints = "".join(f"<p>{escape(failure)}</p>" for failure in self.failures)
        try:
            page = escape(self.path.read_text(encoding="utf-8"))
        except (OSError, UnicodeError) as error:
            raise RunError(f"{self.path}: cannot be read ({error}); write the report again") from error
        return f'{complaints}<iframe srcdoc="{page}" style="width: 100%; height: 60em; border: 0"></iframe>'


def _read_finding(folder: OpenRun, path: Path) -> AttackFinding:
    if not folder.manifest.vouches_for(path):
        raise RunError(f"{path}: is not what this run found; remove it, or attack again")
    finding, about = load_claim(path)
    return AttackFinding(
        attack=str(about["attack"]),
        victim=int(about["victim"]),
        round=str(about["round"]),
        repeat=int(about["repeat"]),
        finding=finding,
        about=about,
    )


def follow_with(progress: ProgressListener | None) -> Callable[[AttackJob, int, int, Mapping[str, float]], None]:
    """Return a function that reports the iterations of attacks to `progress`."""

    def follow(job: AttackJob, iteration: int, iterations: int, values: Mapping[str, float]) -> None:
        if progress is not None:
            progress(f"{job.title}, {name_rounds(job.round)}, client {job.victim}", iteration, iterations)

    return follow


def raise_failures(done: pipeline.AuditResult) -> None:
    """Raise RunError where an attack, a score or a picture failed."""
    if done.failures:
        kept = f"all else is kept, fedsim.open({str(done.folder.path)!r}) reads it"
        error = RunError(f"{'; '.join(done.failures)}; {kept}")
        error.failures = tuple(done.failures)
        raise error
