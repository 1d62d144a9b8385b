"""Attack a recording, score what was found, write both down.

The same code serves `fedsim run` after the last round, a worker beside the round loop, and
`fedsim attack` on a recording made anywhere; all read the same transcript, so results are equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from fedsim import registry
from fedsim.attack import KNOWLEDGE, Attack, Knowledge, Progress
from fedsim.config import AdversaryTable, AttackFile
from fedsim.errors import ConfigError, DataError, FedsimError
from fedsim.experiment import Experiment, build_attacks, data_folder
from fedsim.findings import load_finding, save_finding
from fedsim.randomness import generator
from fedsim.run_folder import RunFolder, write_rows
from fedsim.scoring import Public, Score, Truth, image_metrics, score
from fedsim.transcript import Transcript

log = logging.getLogger("fedsim." + __name__)

SCORES = (
    "attack", "victim", "round", "repeat", "metric", "value", "floor", "floor_guess", "ceiling",
    "higher_is_better", "examples", "seed", "missing",
)  # fmt: skip
IMAGES = ("attack", "victim", "round", "repeat", "image", "metric", "value")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attack on one victim's update, from one random start."""

    title: str
    attack: Attack
    round: int
    victim: int
    repeat: int

    @property
    def name(self) -> str:
        """File name without its ending, unique within the attack's folder."""
        return f"round-{self.round}-client-{self.victim}-repeat-{self.repeat}"


@dataclass(frozen=True, kw_only=True)
class Audit:
    """An adversary set upon one recording.

    Attributes:
        folder: the run.
        spec: whom to attack with what, and what the adversary knows.
        experiment: the federation behind the recording; None where it was recorded elsewhere.
        beside: folder of the attack file, in which `module:callable` and truth files are found.
    """

    folder: RunFolder
    spec: AttackFile
    experiment: Experiment | None
    beside: Path

    def check(self) -> None:
        """Make sure that every attack can be built and is granted what it needs.

        Raises:
            ConfigError, PluginError, KnowledgeError: before any work.
        """
        knowledge = self.knowledge()
        granted = ["labels"] if self.spec.adversary.knowledge.labels else []
        for _, attack in build_attacks(self.spec):
            attack.check(knowledge, granted)
        for file in self.spec.truth.values():
            Truth.load(self.beside / file)
        if granted and self.experiment is None and not self.spec.truth:
            raise ConfigError("adversary.knowledge.labels: there is no truth to take them from; add a [truth] table")

    def knowledge(self) -> Knowledge:
        """What the adversary is granted, labels apart: those differ from victim to victim."""
        table, device = self.spec.adversary.knowledge, _device(self.spec.adversary.device)
        own = _protocol_knowledge(self.experiment) if self.experiment else {"loss": cross_entropy}
        values: dict[str, Any] = {"device": device}
        for name in KNOWLEDGE:
            setting = getattr(table, name)
            if name == "labels" or setting is False:
                continue
            values[name] = own.get(name) if setting is True else _written_out(name, setting, self.beside)
        return Knowledge(**values)

    def run(self, progress: Callable[[Job], Progress] | None = None, rounds: Iterable[int] | None = None) -> list[str]:
        """Attack, score, and return one sentence for each attack that failed; the others go on.

        Findings that are already there with the same settings are kept.
        """
        self.check()
        transcript = Transcript(self.folder.path)
        failures: list[str] = []
        for job in self._jobs(transcript, rounds, failures):
            try:
                self._attack(transcript, job, progress(job) if progress else None)
            except FedsimError as error:
                failures.append(f"{job.title}, {error}")
                log.error("%s", failures[-1])
            except Exception as error:  # attacks may be strangers' code; one that breaks breaks only itself
                what = f"{type(error).__name__}: {error}".splitlines()[0]
                failures.append(f"{job.title}, round {job.round}, client {job.victim}: {what}")
                log.exception("%s", failures[-1])
        return failures

    def _jobs(self, transcript: Transcript, rounds: Iterable[int] | None, failures: list[str]) -> Iterable[Job]:
        adversary = self.spec.adversary
        for number in _chosen_rounds(transcript, adversary, rounds):
            try:
                present = transcript.clients(number)
            except FedsimError as error:
                failures.append(str(error))
                log.error("%s", error)
                continue
            for victim in _chosen_victims(present, adversary):
                for table, attack in build_attacks(self.spec):
                    for repeat in range(adversary.repeats):
                        yield Job(title=table.title, attack=attack, round=number, victim=victim, repeat=repeat)

    def _attack(self, transcript: Transcript, job: Job, progress: Progress | None) -> None:
        path = self.folder.findings / job.title / f"{job.name}.safetensors"
        knowledge = self.knowledge()
        if self.spec.adversary.knowledge.labels:
            if (truth := self.truth(job.victim)) is None:
                raise DataError(f"truth: labels are granted, but no file is named for client {job.victim}; name one")
            knowledge = dataclasses.replace(knowledge, labels=truth.labels.sort().values)
        fingerprint = self._fingerprint(job, knowledge, transcript)
        if path.is_file() and load_finding(path)[1].get("fingerprint") == fingerprint:
            log.info("%s on client %d, round %d: already there", job.title, job.victim, job.round)
            return
        started = time.monotonic()
        finding = job.attack.run(
            transcript.only([job.round]),
            knowledge,
            victim=job.victim,
            rng=generator(self.seed, "attack", job.round, job.victim, job.repeat),
            progress=progress,
        )
        about = {
            "attack": job.title,
            "round": job.round,
            "victim": job.victim,
            "repeat": job.repeat,
            "settings": dataclasses.asdict(job.attack),
            "granted": knowledge.granted(),
            "fingerprint": fingerprint,
            "seconds": round(time.monotonic() - started, 2),
        }
        save_finding(finding, path, about)

    def _fingerprint(self, job: Job, knowledge: Knowledge, transcript: Transcript) -> str:
        """Names everything that the finding of `job` follows from."""
        labels = None if knowledge.labels is None else knowledge.labels.tolist()
        header = dataclasses.asdict(transcript.header(job.round))
        granted = self.spec.adversary.knowledge.model_dump()
        text = json.dumps([repr(job.attack), granted, labels, self.seed, header], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def seed(self) -> int:
        """Seed of the run; 0 for recordings made elsewhere."""
        return self.experiment.seed if self.experiment else 0

    def truth(self, victim: int) -> Truth | None:
        """What `victim` held, or None where nobody says."""
        if str(victim) in self.spec.truth:
            return Truth.load(self.beside / self.spec.truth[str(victim)])
        if self.experiment is None:
            return None
        data, labels = self.experiment.data.train(victim)
        return Truth(data=data, labels=labels)

    def public(self) -> Public | None:
        """Examples of the same kind that no client holds, for floors."""
        if self.experiment is None:
            return None
        test = self.experiment.dataset.test
        return Public(data=test.inputs(slice(0, 5000)), labels=test.labels[:5000])

    def score(self) -> list[dict[str, Any]]:
        """Judge every finding in the folder and write `scores.csv` and `image-scores.csv`."""
        rows, images = [], []
        weights = folder / "weights" if (folder := data_folder()) else None
        public = self.public()
        for path in _findings(self.folder):
            try:
                finding, about = load_finding(path)
                truth = self.truth(int(str(about["victim"])))
                if truth is None:
                    continue
                scores = score(
                    finding,
                    truth,
                    public=public,
                    rng=generator(self.seed, "floor", int(str(about["victim"]))),
                    weights=weights,
                    labels_granted="labels" in about["granted"],  # type: ignore[operator]
                )
            except FedsimError as error:
                log.error("%s: not scored: %s", path.name, error)
                continue
            where = {key: about[key] for key in ("attack", "victim", "round", "repeat")}
            rows += [where | _row(item, len(truth.labels)) | {"seed": self.seed} for item in scores]
            for item in scores:
                images += [
                    where | {"metric": item.metric, "image": place, "value": value}
                    for place, value in enumerate(item.per_image)
                ]
        write_rows(self.folder.scores, SCORES, rows)
        write_rows(self.folder.images, IMAGES, images)
        return rows


def open_audit(path: Path, spec: AttackFile | None, beside: Path | None = None) -> Audit:
    """The audit of the run in `path`, with its own adversary or the one that `spec` describes.

    Raises:
        ConfigError: the recording was made elsewhere and no attack file is given, or no attack is named.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run folder")
    folder = RunFolder(path)
    config = folder.read_experiment()
    if spec is None and config is None:
        raise ConfigError(f"{path}: was recorded elsewhere, so it says nothing of attacks; give an attack file")
    chosen: AttackFile = spec if spec is not None else config  # type: ignore[assignment]
    if not chosen.attack:
        raise ConfigError("attack: no attack is named; add an [[attack]] table with a name")
    return Audit(
        folder=folder,
        spec=chosen,
        experiment=Experiment(config) if config else None,
        beside=beside or path,
    )


def attack_round(path: Path, number: int) -> None:
    """Attack one round of a run that is still going on; called in a process of its own."""
    torch.set_num_threads(1)
    audit = open_audit(path, None)
    if any(audit.folder.transcript.glob("*.safetensors")):  # a recording plan may have kept nothing yet
        audit.run(rounds=[number])


def snapshots_psnr(finding: Any, truth: Truth) -> list[float]:
    """Mean PSNR of each snapshot; the evaluator's curve, unknown to the attack."""
    values = []
    for data in finding.snapshots:
        value = image_metrics(data, truth, None)["psnr"]
        values.append(value.mean().item() if isinstance(value, torch.Tensor) else float("nan"))
    return values


def _protocol_knowledge(experiment: Experiment) -> dict[str, Any]:
    """What the server of a federation knows anyway: it wrote the protocol."""
    channels = experiment.dataset.input_shape[0]
    standard = {"input_mean": [0.0] * channels, "input_std": [1.0] * channels} if experiment.data.standardise else {}
    return standard | {
        "model": experiment.new_model,
        "loss": cross_entropy,
        "input_shape": experiment.dataset.input_shape,
        "num_classes": experiment.dataset.num_classes,
        "value_range": experiment.data.value_range(),
        "learning_rate": experiment.training.learning_rate,
        "local_epochs": experiment.training.local_epochs,
        "batch_size": experiment.training.batch_size,
    }


def _written_out(name: str, setting: Any, beside: Path) -> Any:
    if name == "model":
        return registry.load_object(setting, beside)
    if name == "value_range":
        if len(setting) != 2 or not setting[0] < setting[1]:
            raise ConfigError(f"adversary.knowledge.value_range: expected [lowest, highest], got {setting}")
        return [setting[0]], [setting[1]]
    return tuple(setting) if name == "input_shape" else setting


def _chosen_rounds(transcript: Transcript, adversary: AdversaryTable, only: Iterable[int] | None) -> Sequence[int]:
    """The rounds to attack; with `only`, those among them, for a run that has not come to the others yet."""
    recorded = transcript.rounds
    chosen = recorded if adversary.rounds == "all" else adversary.rounds or recorded[:1]
    if only is not None:
        return [number for number in only if number in chosen and number in recorded]
    for number in chosen:
        if number not in recorded:
            raise ConfigError(f"adversary.rounds: round {number} is not recorded; recorded: {recorded}")
    return chosen


def _chosen_victims(present: list[int], adversary: AdversaryTable) -> Sequence[int]:
    if adversary.victims == "all":
        return present
    return present[:1] if adversary.victims is None else adversary.victims


def _findings(folder: RunFolder) -> list[Path]:
    """Finding files by attack, round, victim and repeat, in the order of their numbers."""

    def key(path: Path) -> tuple[str, list[int]]:
        return path.parent.name, [int(part) for part in path.stem.split("-") if part.isdigit()]

    return sorted(folder.findings.glob("*/*.safetensors"), key=key)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"adversary.device: '{name}' is not usable here ({str(error).splitlines()[0]})") from error
    return device


def _row(item: Score, examples: int) -> dict[str, Any]:
    row = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    del row["per_image"]
    return row | {"examples": examples, "ceiling": "" if item.ceiling is None else item.ceiling}
