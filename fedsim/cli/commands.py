"""The command line: run, train, attack, geometry, report, inspect, data, list, show.

Hyperparameters live in the experiment file; `--set a.b=value` overrides one. Exit codes: 0 done,
1 a run or an attack failed, 2 the request itself is wrong.
"""

from __future__ import annotations

import io
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from inspect import Parameter, formatannotation
from itertools import groupby
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Column, Table

from fedsim.cli.allocator import keep_freed_memory
from fedsim.cli.screen import Once, Phases, Seldom
from fedsim.errors import ConfigError, FedsimError, PluginError, did_you_mean, one_line, what_it_said
from fedsim.files import append_text
from fedsim.plugins import registry
from fedsim.progress import LOGGER
from fedsim.recording import manifest

if TYPE_CHECKING:
    from fedsim.auditing.audit import Audit
    from fedsim.auditing.plan import Job
    from fedsim.experiments.run_folder import RunFolder
    from fedsim.recording.transcript import Transcript
    from fedsim.reporting.summary import Line
    from fedsim.wire.messages import Update

cli = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console()
log = logging.getLogger("fedsim.cli")

Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override one setting, e.g. attack.sme.iterations=200.")
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Where data sets lie; FEDSIM_DATA by default.")]
_STYLES = {"leaks": "bold red", "undecided": "yellow", "beyond the floor": "yellow"}
_INTERRUPTED = "interrupted"
_GO_ON = {
    "run": "; `fedsim run --resume RUN` goes on from what is kept",
    "train": "; the same `fedsim train` goes on from what is kept",
    "attack": "; the same `fedsim attack` goes on from the findings that are kept",
}
"""What to do after an interrupt, by the command that was running."""
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors and the final table only.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print a line for each round and each client.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import code that a run folder names by module:callable; said each time.")
]
Key = Annotated[
    Path | None, typer.Option("--key", metavar="FILE", help="Sign the run's manifest with this secret, or check that.")
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fedsim {version('fedsim-curious')}")  # noqa: T201
        raise typer.Exit


@cli.callback()
def _everywhere(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """What stands before any command; its text is that of this module."""


@cli.command()
def run(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="An experiment file.")] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME by default.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with an interrupted run.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the same folder.")] = False,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: Trust = False,
    key: Key = None,
) -> None:
    """Run a federation under a curious server, attack what it saw, and report."""
    from fedsim.auditing.audit import Audit, open_audit
    from fedsim.experiments.build import Experiment, resolve
    from fedsim.experiments.config import load_config
    from fedsim.experiments.run_folder import RunFolder
    from fedsim.experiments.simulation import default_folder, federate

    _use_data_dir(data_dir)
    _use_key(key)
    if (file is None) == (resume is None):
        raise ConfigError("give an experiment file, or --resume RUN, one of them")
    if resume is not None:
        if overrides or out or overwrite:
            raise ConfigError("--resume goes on with the experiment as it was; leave out --set, --out and --overwrite")
        folder = RunFolder(resume)
        found = folder.read_experiment(trust=trust)
        if found is None:
            raise ConfigError(f"{resume}: holds no run to resume; expected {folder.experiment.name} in it")
        config = found
    else:
        assert file is not None
        config = load_config(file, overrides or [], trust=trust)
        folder = RunFolder(out) if out else default_folder(file)
    attacked = config.adversary.when != "never" and bool(config.attack)
    if attacked:
        Audit(folder=folder, spec=config, experiment=Experiment(resolve(config)), beside=folder.path).check()
    with folder.held(), _logging_to(folder, quiet, verbose) as phases:
        federate(config, folder, resume=resume is not None, overwrite=overwrite)
        # whatever code the experiment names was accepted above
        failures = _attack(open_audit(folder.path, None, trust=True), phases) if attacked else []
        _report(folder.path, None, failures, trust=True, quiet=quiet)
    _finish(failures)


@cli.command()
def train(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An experiment file with a \\[states] table.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The folder for the states; one in the cache by default.")] = None,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: Trust = False,
) -> None:
    r"""Train without an adversary and keep models at the rounds and epochs that \[states] names."""
    from fedsim.experiments.config import load_config
    from fedsim.experiments.training_states import make_states

    _use_data_dir(data_dir)
    with _logging_to(None, quiet, verbose):
        states = make_states(load_config(file, overrides or [], trust=trust), file.stem, out)
    table = Table("state", "test loss", "test accuracy")
    for name, about in states.manifest()["states"].items():
        table.add_row(name, *(f"{about[key]:.3f}" if key in about else "-" for key in ("loss", "accuracy")))
    console.print(table)
    print(f'start from one with\n[model]\nstart = "{states.path(name)}"')  # noqa: T201


@cli.command()
def attack(
    run: RunPath,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="An attack file; the run's own by default.")
    ] = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: Trust = False,
    key: Key = None,
) -> None:
    """Attack a recorded run, or the recording of somebody's Flower app."""
    from fedsim.auditing.audit import open_audit
    from fedsim.experiments.config import AttackFile, Config, check, check_trust, is_in_a_run, read_toml
    from fedsim.experiments.integrity import adopt
    from fedsim.experiments.run_folder import RunFolder

    _use_data_dir(data_dir)
    _use_key(key)
    named = file is not None
    for override in overrides or ():
        if (table := override.partition(".")[0]) in set(Config.model_fields) - set(AttackFile.model_fields):
            raise ConfigError(f"--set {override}: the recording was made with [{table}] as it was, so leave that out")
    if file is None and overrides:
        file = RunFolder(run).experiment
    spec: AttackFile | None = None
    if file is not None:
        tables = read_toml(file, overrides or [])
        spec = check(Config if set(tables) - set(AttackFile.model_fields) else AttackFile, tables, str(file))
        check_trust(spec, file, trust or not is_in_a_run(file, run))
    command = ["fedsim", "attack", "RUN", *([file.name] if named and file else []), *_as_options(overrides or [])]
    audit = open_audit(run, spec, file.parent if file else None, trust=trust, command=shlex.join(command))
    with audit.folder.held(), _logging_to(audit.folder, quiet, verbose) as phases:
        audit.check()
        adopt(audit.folder)
        audit.folder.check_key()
        if audit.experiment is not None:
            audit.folder.note_experiment(audit.experiment.config)
        before = _stamps(audit.folder)
        failures = _attack(audit, phases)
        if before and not failures and _stamps(audit.folder) == before:
            log.info(
                "nothing new: all that was asked for is there already; other clients, rounds or settings give more, as "
                "in fedsim attack %s --set 'adversary.victims=[1]'",
                run,
            )
        _report(run, audit, failures, quiet=quiet)
    _finish(failures)


@cli.command()
def geometry(
    run: RunPath,
    rounds: Annotated[list[int] | None, typer.Option("--round", help="Rounds; the first recorded by default.")] = None,
    data_dir: DataDir = None,
    trust: Trust = False,
) -> None:
    """Say how well recorded updates can be matched by one gradient: the analysis of SME, Sect. 5.1."""
    from fedsim.experiments.build import Experiment
    from fedsim.experiments.run_folder import RunFolder, write_bytes, write_rows
    from fedsim.recording.transcript import Transcript
    from fedsim.reporting.figures import draw, style
    from fedsim.reporting.geometry import panels, recorded

    _use_data_dir(data_dir)
    folder = RunFolder(run)
    if (config := folder.read_experiment(trust=trust)) is None:
        raise ConfigError(
            f"{run}: was recorded elsewhere, so nobody here knows its clients' data; name a run of fedsim"
        )
    transcript = Transcript(run)
    for number in rounds or ():
        if number not in transcript.rounds:
            raise ConfigError(f"geometry: round {number} is not recorded; recorded: {transcript.rounds}")
    found = list(recorded(Experiment(config), transcript, rounds or transcript.rounds[:1]))
    rows = [{"round": number, "client": client, **item.summary} for number, client, item in found]
    with folder.held():
        write_rows(run / "geometry.csv", list(rows[0]), rows)
    title = f"{_number(len(rows), 'update')}, {_rounds(number for number, _, _ in found)} of {run}"
    table = Table("", "mean", "deviation", "lowest", "highest", title=escape(title))
    for name in found[0][2].summary:
        values = [float(row[name]) for row in rows]
        spread = fmean(values), pstdev(values), min(values), max(values)
        table.add_row(name, *(f"{value:.3f}" for value in spread))
    console.print(table)
    for name, panel in zip(("ratios", "cosines"), panels([item for _, _, item in found], style(0)), strict=True):
        path = run / f"geometry-{name}.png"
        with folder.held():
            write_bytes(path, draw(panel))
        console.print(f"picture: {path}", soft_wrap=True, markup=False)


@cli.command()
def report(run: RunPath, data_dir: DataDir = None, trust: Trust = False, key: Key = None) -> None:
    """Write report.html anew from what a run folder holds."""
    from fedsim.experiments.run_folder import RunFolder

    _use_data_dir(data_dir)
    _use_key(key)
    if not run.is_dir():
        raise ConfigError(f"{run}: no such run folder")
    failures: list[str] = []
    with RunFolder(run).held():
        _report(run, None, failures, trust=trust)
    _finish(failures)


@cli.command()
def inspect(
    run: RunPath,
    hash: Annotated[bool, typer.Option("--hash", help="Print one SHA-256 of the whole recording.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Show a row for each update as well.")] = False,
    key: Key = None,
) -> None:
    """Say what a recording holds, and whether the run is still what was written."""
    from fedsim.experiments.integrity import held_against_manifest
    from fedsim.experiments.run_folder import RunFolder
    from fedsim.recording.transcript import Transcript

    _use_key(key)
    if run.is_dir():
        RunFolder(run).check_kinds()
    transcript = Transcript(run)
    if hash:
        print(transcript.hash())  # noqa: T201
        return
    table = Table("round", "client", "N", "reported", "bytes", "update norm", title=escape(str(transcript.folder)))
    failures, sizes, norms, sent = [], dict[int, list[int]](), list[float](), dict[int, int]()
    missing = 0
    for number in transcript.rounds:
        try:
            header = transcript.header(number)
            for client in transcript.clients(number):
                update = transcript.update(number, client)
                reported = ", ".join(f"{key} {value:.4g}" for key, value in update.metrics.items())
                norm, what = _norm(update)
                told = "-" if norm is None else f"{norm:.4g}{what}"
                size = update.payload.nbytes
                sent[number] = sent.get(number, 0) + size
                shown = str(number), str(client), str(update.num_examples), escape(one_line(reported)), str(size), told
                table.add_row(*shown)
                sizes.setdefault(client, []).append(update.num_examples)
                norms += [] if norm is None else [norm]
            for client, why in header.failures.items():
                table.add_row(str(number), str(client), "-", f"failed: {escape(why)}", "-", "-", style="yellow")
            missing += len(header.failures)
        except FedsimError as error:
            failures.append(str(error))
    if rows:
        console.print(table)
    console.print(_summary_of(transcript, sizes, norms, list(sent.values()), missing))
    verdict = held_against_manifest(run)
    failures += verdict.differences
    if not failures:
        console.print(f"intact: {_counted(transcript)}, each as it was recorded (by SHA-256)")
        console.print(verdict.text, soft_wrap=True, markup=False)
    _finish(failures)


def _summary_of(
    transcript: Transcript,
    sizes: Mapping[int, Sequence[int]],
    norms: Sequence[float],
    sent: Sequence[int],
    missing: int,
) -> Table:
    """What the readable rounds of a recording hold, in a few lines; `sent` are bytes, of all clients of a round."""

    def spread(values: Sequence[float]) -> str:
        return f"{min(values):.4g} to {max(values):.4g}, {fmean(values):.4g} on average" if values else "-"

    table = Table(show_header=False, box=None, title=escape(str(transcript.folder)), title_justify="left")
    numbers, updates = transcript.rounds, [size for own in sizes.values() for size in own]
    size = sum(file.stat().st_size for file in transcript.folder.glob("round-*.safetensors")) / 1e6
    table.add_row("rounds", f"{len(numbers)}, {numbers[0]} to {numbers[-1]}" if numbers else "none")
    table.add_row("clients", f"{len(sizes)}, {min(sizes)} to {max(sizes)}" if sizes else "none")
    table.add_row("updates", f"{len(updates)}, and {_number(missing, 'failure')}")
    table.add_row("N", spread(updates))
    table.add_row("update norm", spread(norms))
    table.add_row("bytes sent", f"{sum(sent)}, a round {spread(sent)}" if sent else "-")
    table.add_row("size", f"{size:.1f} MB")
    return table


@cli.command("data")
def show_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set, or an experiment file (*.toml).")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The picture, a PNG; runs/data-NAME.png by default.")] = None,
    data_dir: DataDir = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch it into the data folder first.")] = False,
    trust: Trust = False,
) -> None:
    """Say what a data set is and who holds what of it, and draw a picture of that."""
    from fedsim.reporting.holdings import client_table, description, survey
    from fedsim.reporting.holdings_picture import draw_to

    _use_data_dir(data_dir)
    if out is not None and out.suffix != ".png":
        raise ConfigError(f"--out {out}: the picture is a PNG; name a file that ends in .png")
    holdings = survey(name, overrides or [], fetch=download, trust=trust)
    console.print(description(holdings))
    console.print(client_table(holdings))
    path = out or Path("runs") / f"data-{Path(name).stem}.png"
    draw_to(path, holdings)
    console.print(f"picture: {path}", soft_wrap=True, markup=False)


@cli.command("list")
def list_plugins(
    group: Annotated[
        str | None, typer.Argument(help="attacks, defenses, strategies, datasets, partitions or models; else all.")
    ] = None,
) -> None:
    """List registered plug-ins, one a line, name first."""
    if group is not None and group not in registry.GROUPS:
        raise ConfigError(f"list: nothing is called '{group}', {did_you_mean(group, registry.GROUPS)}")
    chosen = [known for known in registry.GROUPS if group in (None, known)]
    for known in chosen:
        if group is None:
            print(f"{'' if known == chosen[0] else chr(10)}{known}:")  # noqa: T201
        names = registry.names(known)
        width = max(map(len, names))
        for name in names:
            print(f"{name:<{width}}  {_one_line(known, name)}")  # noqa: T201


@cli.command()
def show(name: Annotated[str, typer.Argument(help="A plug-in of any kind.")]) -> None:
    """Show a plug-in: what it does, its settings and defaults, its paper, what it needs."""
    groups = [group for group in registry.GROUPS if name in registry.names(group)]
    if not groups:
        everything = [known for group in registry.GROUPS for known in registry.names(group)]
        raise PluginError(f"nothing is called '{name}', {did_you_mean(name, everything)}")
    for group in groups:
        cls = registry.load(group, name)
        owner = registry.entry(group, name).dist
        console.print(f"[bold]{name}[/]  ({group}, from {owner.name if owner else '?'})\n")
        console.print(_docstring(cls), markup=False, highlight=False, soft_wrap=True)
        table = Table("setting", "type", "default")
        for key, parameter in registry.parameters(cls).items():
            default = "required" if parameter.default is parameter.empty else repr(parameter.default)
            table.add_row(key, escape(_kind(cls, key, parameter)), escape(default))
        console.print(table if table.rows else "no settings")
        if needs := getattr(cls, "needs", None):
            console.print(f"needs: {', '.join(sorted(needs))}")
        if uses := getattr(cls, "uses", None):
            console.print(f"uses, where granted: {', '.join(sorted(uses))}", soft_wrap=True)
        if paper := getattr(cls, "paper", None):
            console.print(f"paper: {paper} {paper.url}", markup=False, soft_wrap=True)


def _kind(cls: type, key: str, parameter: Parameter) -> str:
    """What a setting may be, with the words it may be one of."""
    try:
        kind = get_type_hints(cls).get(key, parameter.annotation)
    except NameError:  # an annotation that is imported for type checkers alone
        kind = parameter.annotation
    return kind if isinstance(kind, str) else formatannotation(kind)


def main() -> None:
    """Entry point of `fedsim`: errors become one sentence and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± is no reason to fail
    keep_freed_memory()
    sentence, code = _outcome()
    if sentence:
        _say(sentence)
    if sentence == _interrupted():  # Flower's server thread would go on waiting for clients that are gone
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _outcome() -> tuple[str, int]:
    """Do what the command line says; what is to be said of it, and the exit code."""
    try:
        registry.check_installation()
        code = cli(standalone_mode=False) or 0
    except FedsimError as error:
        return str(error), error.exit_code
    except typer.Abort:
        return _interrupted(), 1
    except SystemExit as error:  # typer's own do not come here
        return f"somebody's code {what_it_said(error).removeprefix('it ')}, and what was asked for was not done", 1
    except OSError as error:  # a folder on the way that may not be entered, a name that is too long
        if error.filename is None:
            raise
        return f"{error.filename}: {error.strerror}; check the path and its permissions", 1
    except Exception as error:
        if getattr(error, "exit_code", None) == 2 and hasattr(error, "format_message"):
            # Without a command the help page has been printed, and nothing is left to say.
            return error.format_message(), 2
        raise
    return (_interrupted(), 1) if code == 128 + signal.SIGINT else ("", code)  # what typer makes of Ctrl-C


def _interrupted() -> str:
    command = next((word for word in sys.argv[1:] if word in _GO_ON), "")
    return _INTERRUPTED + _GO_ON.get(command, "")


def _as_options(overrides: Iterable[str]) -> list[str]:
    """The overrides as they were given, but for folders of this machine."""
    options: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        options += ["--set", f"{key}={Path(value).name if Path(value).is_absolute() else value}"]
    return options


def _attack(audit: Audit, phases: Phases) -> list[str]:
    from fedsim.reporting.evidence import kinds
    from fedsim.reporting.summary import lines

    def follow(job: Job, iteration: int, iterations: int, values: Mapping[str, float]) -> None:
        phases.part(job.title, job.name, iteration / max(iterations, 1))

    failures = audit.run(follow)
    rows = audit.score(failures)
    for attack, found in groupby(lines(rows, kinds(audit.folder, audit)), key=lambda line: line.summary.attack):
        console.print(_score_table(attack, list(found)))
    return failures


def _stamps(folder: RunFolder) -> dict[Path, int]:
    """When each finding was written."""
    return {path: path.stat().st_mtime_ns for path in folder.findings.rglob("*.safetensors")}


def _score_table(attack: str, found: Sequence[Line]) -> Table:
    """One attack's scores, the main one first, in the words of the page; narrow enough for 80 columns."""
    columns = Column("metric", no_wrap=True), "score", "n", "best guess", "reading"
    table = Table(*columns, title=escape(f"What leaked to {attack}"), box=SIMPLE_HEAD)
    for line in found:
        item = line.summary
        if not item.missing:
            score = item.interval_text.replace(" [", "\n[").replace(" ± ", "\n± ")
            says = f"[{_STYLES.get(line.verdict, 'default')}]{escape(line.verdict)}[/]"
            texts = (score, item.count_text.removeprefix("n = "), item.floor_text.replace(" (", " ").removesuffix(")"))
            table.add_row(item.metric, *map(escape, texts), f"{says}\n[dim]{escape(line.remark)}[/]")
    missing = [f"{line.summary.metric} {line.summary.text}" for line in found if line.summary.missing]
    table.caption = escape("; ".join(missing))
    return table


def _counted(transcript: Transcript) -> str:
    updates = sum(len(transcript.clients(number)) for number in transcript.rounds)
    return f"{_number(updates, 'update')} of {_number(len(transcript.rounds), 'round')}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _rounds(numbers: Iterable[int]) -> str:
    """`round 3`, or `rounds 1, 3`."""
    chosen = sorted(set(numbers))
    return f"round{'s' * (len(chosen) > 1)} {', '.join(map(str, chosen))}"


def _norm(update: Update) -> tuple[float | None, str]:
    """L2 norm of w_t - w_T, all tensors together, or of a gradient, and a word for that.

    None where the client returned other tensors.
    """
    if update.gradient is not None or update.sends_delta:
        what = update.payload.kind
        return sum(t.double().square().sum().item() for t in update.pseudo_gradient.values()) ** 0.5, f" ({what})"
    after = update.after
    if any(name not in after or after[name].shape != tensor.shape for name, tensor in update.before.items()):
        return None, ""
    moved = (tensor.double() - after[name].double() for name, tensor in update.before.items())
    return sum(t.square().sum().item() for t in moved) ** 0.5, ""


def _report(path: Path, audit: Audit | None, failures: list[str], *, trust: bool = False, quiet: bool = False) -> None:
    from fedsim.reporting.page import write_report

    written = write_report(path, audit, failures, trust=trust)
    if not quiet:
        console.print(f"report: {written}", soft_wrap=True, markup=False)


def _finish(failures: list[str]) -> None:
    if failures:
        for failure in failures:
            _say(failure)
        raise typer.Exit(1)


def _say(sentence: str) -> None:
    print(f"fedsim: {sentence}", file=sys.stderr)  # noqa: T201


def _use_data_dir(folder: Path | None) -> None:
    if folder is not None:
        os.environ["FEDSIM_DATA"] = str(folder.resolve())


def _use_key(file: Path | None) -> None:
    """The processes of a run, on any engine, find the key where this one does."""
    if file is not None:
        os.environ[manifest.KEY] = str(file.resolve())
    manifest.key()  # says now if it cannot be used


@contextmanager
def _logging_to(folder: RunFolder | None, quiet: bool = False, verbose: bool = False) -> Iterator[Phases]:
    """Show the program's own log lines and how far it is, and keep the lines in the run folder once that exists."""
    logger, progress = logging.getLogger("fedsim"), logging.getLogger(LOGGER)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.propagate = progress.propagate = False
    screen = RichHandler(console=console, show_path=False, show_level=False, log_time_format="%H:%M:%S")
    screen.setFormatter(_Sentence())
    if quiet:
        screen.setLevel(logging.ERROR)
    if not verbose:
        screen.addFilter(Seldom())
    logger.handlers = [screen, *([_LogFile(folder.log)] if folder else [])]
    for handler in logger.handlers:
        handler.addFilter(Once())
    with Phases(console) as phases:
        progress.setLevel(logging.NOTSET if quiet else logging.DEBUG)
        progress.handlers = [] if quiet else [phases]
        try:
            yield phases
        finally:
            logger.handlers, logger.propagate = [], True
            progress.handlers, progress.propagate = [], True
            progress.setLevel(logging.NOTSET)


class _Sentence(logging.Formatter):
    """A line for the screen; a traceback is for the file alone."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage()


class _LogFile(logging.Handler):
    """Appends to a file, from the moment its folder exists."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if self._path.parent.is_dir():
            try:
                append_text(self._path, self.format(record) + "\n")
            except OSError:
                self.handleError(record)


def _one_line(group: registry.Group, name: str) -> str:
    try:
        cls = registry.load(group, name)
    except FedsimError as error:
        return f"does not load: {error}"
    paper = getattr(cls, "paper", None)
    about = f"{paper.authors.split(',')[0]}{' et al.' * (',' in paper.authors)} {paper.year}. " if paper else ""
    owner = registry.entry(group, name).dist
    return f"{about}{_docstring(cls).splitlines()[0]}  [{owner.name if owner else '?'}]"


def _docstring(cls: Any) -> str:
    import inspect as introspection

    return introspection.getdoc(cls) or "(no description)"
