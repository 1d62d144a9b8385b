"""Findings that are in the run folder already: where they are, what they follow from, and which are still valid."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from fedsim.attacks import Knowledge
from fedsim.auditing.plan import Job, Named
from fedsim.auditing.variants import settings_of, variant
from fedsim.errors import ConfigError, TranscriptError
from fedsim.experiments.config import AppTable, KnowledgeTable
from fedsim.experiments.run_folder import RunFolder
from fedsim.findings import Finding, LocalModel
from fedsim.knowledge import FACTS
from fedsim.plugins import registry
from fedsim.plugins.code import UNREADABLE, code_hash, hash_of_references
from fedsim.recording.finding_files import load_claim, load_finding, read_about, save_finding
from fedsim.recording.header import hash_state
from fedsim.recording.manifest import is_noted
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import State

log = logging.getLogger(__name__)


class Models(Mapping[int, State]):
    """A model of each client, read when it is asked for."""

    def __init__(self, readers: Mapping[int, Callable[[], State]]) -> None:
        self._readers = readers

    def __getitem__(self, client: int) -> State:
        return self._readers[client]()

    def __contains__(self, client: object) -> bool:
        return client in self._readers  # without reading

    def __iter__(self) -> Iterator[int]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The findings in a run folder.

    Attributes:
        folder: the run.
        attacks: of the file.
        order: their titles; an attack comes after those that it builds on.
        granted: what the file grants.
        beside: folder in which `module:callable` is found.
        seed: seed of the run.
        own: whether fedsim made the run, so that the clients' records cannot change.
        app: what the file says of the messages of an app.
    """

    folder: RunFolder
    attacks: Named
    order: Sequence[str]
    granted: KnowledgeTable
    beside: Path
    seed: int
    own: bool
    app: AppTable

    @cached_property
    def model_code(self) -> str | None:
        """Hash of the files of model, outputs and loss that the attack file names; None if it names none."""
        named = (self.granted.model, self.app.outputs, self.granted.loss)
        written = [setting for setting in named if isinstance(setting, str) and ":" in setting]
        for setting in written:
            registry.load_object(setting, self.beside)
        return hash_of_references(written)

    @cached_property
    def present(self) -> dict[str, tuple[Any, ...]]:
        """Variant, hash of the code and hash of the model's code of each attack as they are now, by title."""
        return {
            table.title: (self.variants[table.title], code_hash(type(attack)), self.model_code)
            for table, attack in self.attacks
        }

    def is_outdated(self, about: Mapping[str, Any]) -> bool:
        """Whether a finding was made by other code of its attack than the present one, or of the model it was given."""
        codes = {table.name: code_hash(type(attack)) for table, attack in self.attacks}
        mine, theirs = self.present.get(str(about["attack"]), ("",)), made_with(about)
        same_variant = mine[0] == theirs[0]
        return about["code"] != codes.get(about["plugin"], about["code"]) or (same_variant and mine != theirs)

    @cached_property
    def variants(self) -> dict[str, str]:
        """By title, a hash of the plug-in, its settings, the granted facts that it reads and the variant it builds on.

        Findings of different variants stay side by side. An edited plug-in is no other variant: its old findings cannot
        be made again, so they are replaced.
        """
        found: dict[str, str] = {}
        attacks = {table.title: (table.name, attack) for table, attack in self.attacks}
        granted = self.granted.model_dump()
        for title in self.order:
            plugin, attack = attacks[title]
            known = {name: granted[name] for name in FACTS if name in attack.handed()} | self._said_of_app
            found[title] = variant(plugin, settings_of(attack), known, found.get(attack.builds_on or ""))
        return found

    @property
    def _said_of_app(self) -> dict[str, Any]:
        return {"app": said} if (said := self.app.model_dump(exclude_defaults=True)) else {}

    @cached_property
    def _homes(self) -> dict[str, Path]:
        """By title, the folder for the findings of this variant alone: the title, or `title-VARIANT`."""
        return {title: _home(self.folder.findings / title, own) for title, own in self.variants.items()}

    def place(self, job: Job) -> Path:
        """Where what `job` finds is kept."""
        return self._homes[job.title] / f"{job.name}.safetensors"

    def keep(self, finding: Finding, path: Path, about: Mapping[str, object]) -> None:
        """Write a finding, or an optimum, and note it in the manifest."""
        save_finding(finding, path, about)
        self.folder.note(path)

    def is_ours(self, path: Path) -> bool:
        """Whether a finding is there, and has the hash that the manifest of the run notes; if not, it is made anew."""
        if not path.is_file():
            return False
        if not is_noted(self.folder.path, path):
            log.warning("%s/%s: is not what this run found, so it is made anew", path.parent.name, path.name)
            return False
        return True

    def is_there(self, job: Job, fingerprint: str) -> bool:
        """Whether the finding of `job` is there and follows from the same inputs; logs that, or why it is made anew."""
        path = self.place(job)
        return self.is_ours(path) and _is_there(job, load_claim(path)[1], fingerprint, self.model_code)

    def decoded(self, title: str, job: Job) -> tuple[Models, list[str]]:
        """The local models that the attack called `title` found, with its present settings, in the rounds of `job`.

        Returns:
            The models by client, and the hash of each: findings that build on a model are valid as long as it is.
        """
        models: dict[int, Callable[[], State]] = {}
        hashes, now = [], self.present[title]
        for path in sorted(self._homes[title].glob(f"round-{job.round}-client-*-repeat-{job.repeat}.*")):
            if path.suffix != ".safetensors" or not is_noted(self.folder.path, path):
                continue
            about, digest = _model_at(path, path.stat().st_mtime_ns)
            if made_with(about) != now or about["rounds"] != list(job.rounds):
                continue
            if digest is None:
                raise ConfigError(
                    f"attack.{job.title}.source: '{title}' claims no local models; name an attack that does"
                )
            models[int(str(about["victim"]))] = partial(_read_model, path)
            hashes.append(digest)
        return Models(models), hashes

    def fingerprint(self, job: Job, knowledge: Knowledge, transcript: Transcript, upstream: Sequence[str]) -> str:
        """A hash of everything that the finding of `job` follows from."""
        labels = None if knowledge.labels is None else knowledge.labels.tolist()
        headers = [transcript.header(number).plain() for number in job.rounds]
        table = self.granted.model_dump()
        granted = {name: table[name] for name in knowledge.granted()} | self._said_of_app
        code = [] if (own := code_hash(type(job.attack))) is None else [{"code": own}]
        # Of a run of fedsim only candidates and auxiliary records can change, by their number.
        outside = _records_hash(replace(knowledge, records=None, partial_records=None) if self.own else knowledge)
        model = [] if self.model_code is None else [{"model": self.model_code}]
        parts = [repr(job.attack), granted, labels, self.seed, headers, *upstream, *code, *outside, *model]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _home(plain: Path, own: str) -> Path:
    for path in sorted(plain.glob("*.safetensors")):
        with suppress(TranscriptError):  # a damaged finding is reported where it is scored
            if read_about(path).get("variant") != own:
                return plain.with_name(f"{plain.name}-{own}")
    return plain


def _is_there(job: Job, about: Mapping[str, object], fingerprint: str, model_code: str | None) -> bool:
    """Whether the finding that `about` describes is that of `job`; logs that, or why it is made anew."""
    who, code = f"{job.title} on client {job.victim}, round {job.round}", code_hash(type(job.attack))
    codes = {f"of {job.plugin}": ("code", code), "of the model": ("model_code", model_code)}
    if homeless := [whose for whose, (_, now) in codes.items() if now == UNREADABLE]:
        log.info("%s: attacked anew, because the code %s is in no file", who, homeless[0])
        return False
    if about.get("fingerprint") == fingerprint:
        log.info("%s: already there", who)
        return True
    changed = [whose for whose, (key, now) in codes.items() if about.get(key) != now]
    if about.get("plugin") == job.plugin and changed:
        log.info("%s: attacked anew, because the code %s has changed", who, changed[0])
    return False


@cache
def _model_at(path: Path, changed: int) -> tuple[dict[str, object], str | None]:
    """What a finding says of itself, and the hash of the model that it claims; None where it claims none.

    Many jobs build on one model, so it is read once, until the file is `changed` (nanoseconds).
    """
    finding, about = load_claim(path)
    return about, hash_state(finding.state) if isinstance(finding, LocalModel) else None


def _read_model(path: Path) -> State:
    finding, _ = load_finding(path)
    assert isinstance(finding, LocalModel)
    return finding.state


def _records_hash(knowledge: Knowledge) -> list[str]:
    """Hashes of the records that are granted, if there are any."""
    tensors = [tensor.contiguous().numpy() for table in knowledge.tables.values() for tensor in table.tensors.values()]
    return [hashlib.sha256(tensor.tobytes()).hexdigest() for tensor in tensors]


def made_with(about: Mapping[str, Any]) -> tuple[Any, ...]:
    """Variant, hash of the code and hash of the model's code of a finding."""
    return tuple(about.get(key) for key in ("variant", "code", "model_code"))
