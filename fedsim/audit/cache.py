"""Find the findings that are in a run folder already, and decide which of them are still valid."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from fedsim.audit.evaluation.case import Case
from fedsim.audit.finding_files import load_claim, load_finding, read_facts, save_finding
from fedsim.audit.plan import AttackJob, TitledAttacks
from fedsim.audit.variants import hash_variant, settings_of
from fedsim.base.content_hashes import hash_json
from fedsim.base.errors import ConfigError, FedsimError, TranscriptError, name_rounds
from fedsim.federation.adversary_tables import KnowledgeTable
from fedsim.federation.open_run import OpenRun
from fedsim.interfaces.attack import Knowledge
from fedsim.interfaces.findings import Finding, LocalModel
from fedsim.interfaces.knowledge import FACTS, MESSAGE_FACTS
from fedsim.plugins import registry
from fedsim.plugins.code_hashes import UNREADABLE, hash_plugin_code, hash_referenced_code
from fedsim.recording.adversary_role import Who
from fedsim.recording.header import hash_state
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State

log = logging.getLogger(__name__)
MESSAGES_HASH = "messages"
"""Key of a finding's metadata: what `FindingCache.hash_messages` gave of its rounds."""


class LazyModels(Mapping[int, State]):
    """A model of each client, read from its file each time that it is looked up."""

    def __init__(self, readers: Mapping[int, Callable[[], State]]) -> None:
        self._readers = readers

    def __getitem__(self, client: int) -> State:
        return self._readers[client]()

    def __contains__(self, client: object) -> bool:
        return client in self._readers  # Mapping's own method would read the model

    def __iter__(self) -> Iterator[int]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True, kw_only=True)
class FindingCache:
    """Findings in a run folder.

    Attributes:
        titles: of the attacks; an attack comes after those that it builds on.
        app: the statements of the file about the messages of a foreign app.
        who: attacks, see `AdversaryTable.who`.
    """

    folder: OpenRun
    attacks: TitledAttacks
    titles: Sequence[str]
    knowledge_table: KnowledgeTable
    base_folder: Path
    case: Case
    app: MessageFormat
    who: Who = "server"

    @cached_property
    def model_code(self) -> str | None:
        """Hash of the code of model, outputs and loss that the attack file names, or None."""
        settings = (self.knowledge_table.model, self.app.outputs, self.knowledge_table.loss)
        references = [setting for setting in settings if isinstance(setting, str) and ":" in setting]
        for reference in references:
            registry.load_object(reference, self.base_folder)
        return hash_referenced_code(references)

    @cached_property
    def current_versions(self) -> dict[str, tuple[Any, ...]]:
        """Map each title to the present version of its attack.

        A version is the variant, the hash of the attack's code and that of the model's code.
        """
        versions: dict[str, tuple[Any, ...]] = {}
        for table, attack in self.attacks:
            variant_hash = self.variants[table.title]
            versions[table.title] = (variant_hash, hash_plugin_code(type(attack)), self.model_code)
        return versions

    def is_outdated(self, about: Mapping[str, Any]) -> bool:
        """Return whether the code of a finding's attack, or of its model, has changed."""
        codes = {table.name: hash_plugin_code(type(attack)) for table, attack in self.attacks}
        if about["code"] != codes.get(about["plugin"], about["code"]):
            return True
        current, recorded = self.current_versions.get(str(about["attack"]), ("",)), _finding_version(about)
        return current[0] == recorded[0] and current != recorded

    def hash_messages(self, rounds: Sequence[int]) -> str:
        """Return a SHA-256 over the headers of recorded rounds, which have the hashes of all that was sent in them."""
        key = tuple(rounds)
        if key not in self._message_hashes:
            recording = self.folder.recording
            if missing := set(key) - set(recording.rounds):
                raise TranscriptError(f"{recording.folder}: round {min(missing)} is not recorded")
            self._message_hashes[key] = hash_json([recording.sha256(number) for number in key])
        return self._message_hashes[key]

    @cached_property
    def _message_hashes(self) -> dict[tuple[int, ...], str]:
        return {}

    def is_of_other_messages(self, about: Mapping[str, Any]) -> bool:
        """Return whether a finding was made from other messages than these rounds hold now."""
        try:
            return about.get(MESSAGES_HASH) not in (None, self.hash_messages(about["rounds"]))
        except FedsimError:  # a damaged round is named where it is read
            return False

    @cached_property
    def variants(self) -> dict[str, str]:
        """Map each title to its variant.

        A variant is a hash of the plug-in, its settings, the granted facts that it reads and the
        variant that it builds on. Findings of different variants are kept side by side. A plug-in
        whose code was edited is no other variant: its old findings cannot be made again, so they
        are replaced.
        """
        variants: dict[str, str] = {}
        attacks = {table.title: (table.name, attack) for table, attack in self.attacks}
        granted = self.knowledge_table.model_dump()
        for title in self.titles:
            plugin, attack = attacks[title]
            facts = {name: granted[name] for name in FACTS if name in attack.facts_to_grant()} | self._message_settings
            source_variant = variants.get(attack.builds_on or "")
            variants[title] = hash_variant(plugin, settings_of(attack), facts, source_variant)
        return variants

    @property
    def _message_settings(self) -> dict[str, Any]:
        settings = self.app.model_dump(exclude={"defended"}, exclude_defaults=True) | self.withheld_messages
        return ({"app": settings} if settings else {}) | ({} if self.who == "server" else {"who": self.who})

    @property
    def withheld_messages(self) -> dict[str, bool]:
        """Return as false those facts that messages show and the threat model withholds."""
        return {name: False for name in MESSAGE_FACTS if not getattr(self.knowledge_table, name)}

    @cached_property
    def _finding_folders(self) -> dict[str, Path]:
        """Map each title to the folder of its variant's findings, `title` or `title-VARIANT`."""
        folders: dict[str, Path] = {}
        for title, variant_hash in self.variants.items():
            folders[title] = _variant_folder(self.folder.findings / title, variant_hash)
        return folders

    def finding_path(self, job: AttackJob) -> Path:
        """Return the path of the finding of `job`."""
        return self._finding_folders[job.title] / f"{job.name}.safetensors"

    def save(self, finding: Finding, path: Path, about: Mapping[str, object]) -> None:
        """Save a finding, or an optimal local model, and note it in the manifest."""
        save_finding(finding, path, about)
        self.folder.manifest.note(path)

    def is_intact(self, path: Path) -> bool:
        """Return whether a finding is there and has the hash that the manifest notes."""
        if not path.is_file():
            return False
        if not self.folder.manifest.vouches_for(path):
            log.warning("%s/%s: was changed, so the attack runs again", path.parent.name, path.name)
            return False
        return True

    def is_up_to_date(self, job: AttackJob, fingerprint: str) -> bool:
        """Return whether the finding of `job` is there and follows from the same inputs; log that, or why not."""
        path = self.finding_path(job)
        if not self.is_intact(path):
            return False
        _, about = load_claim(path)
        name = f"{job.title} on client {job.victim}, {name_rounds(job.round)}"
        attack_code = hash_plugin_code(type(job.attack))
        codes = {f"of {job.plugin}": ("code", attack_code), "of the model": ("model_code", self.model_code)}
        unreadable = [owner for owner, (_, code) in codes.items() if code == UNREADABLE]
        if unreadable:
            log.info("%s: attacked anew, because the code %s is in no file", name, unreadable[0])
            return False
        if about.get("fingerprint") == fingerprint:
            log.info("%s: already there", name)
            return True
        changed = [owner for owner, (key, code) in codes.items() if about.get(key) != code]
        if about.get("plugin") == job.plugin and changed:
            log.info("%s: attacked anew, because the code %s has changed", name, changed[0])
        return False

    def load_models(self, title: str, job: AttackJob) -> tuple[LazyModels, list[str]]:
        """Find the local models that attack `title` claimed in the rounds of `job`.

        Models that an earlier version of the attack claimed are left out.

        Returns:
            The models by client, and the hash of each: findings that build on a model are valid as
            long as it is.
        """
        readers: dict[int, Callable[[], State]] = {}
        hashes, current = [], self.current_versions[title]
        pattern = f"round-{job.span}-client-*-repeat-{job.repeat}.*"
        for path in sorted(self._finding_folders[title].glob(pattern)):
            if path.suffix != ".safetensors" or not self.folder.manifest.vouches_for(path):
                continue
            about, model_hash = _read_model_hash(path, path.stat().st_mtime_ns)
            if _finding_version(about) != current or about["rounds"] != list(job.rounds):
                continue
            if model_hash is None:
                raise ConfigError(
                    f"attack.{job.title}.source: '{title}' claims no local models; name an attack that does"
                )
            readers[int(str(about["victim"]))] = partial(_read_model, path)
            hashes.append(model_hash)
        return LazyModels(readers), hashes

    def fingerprint(self, job: AttackJob, knowledge: Knowledge, transcript: Transcript, upstream: Sequence[str]) -> str:
        """Return a hash of everything that the finding of `job` follows from."""
        labels = None if knowledge.labels is None else knowledge.labels.tolist()
        headers = [transcript.header(number).to_json() for number in job.rounds]
        table = self.knowledge_table.model_dump()
        granted = {name: table[name] for name in knowledge.granted_facts()} | self._message_settings
        attack_code = hash_plugin_code(type(job.attack))
        code = [] if attack_code is None else [{"code": attack_code}]
        record_hashes = _record_hashes(self.case.hashed_knowledge(knowledge))
        model = [] if self.model_code is None else [{"model": self.model_code}]
        parts = [
            repr(job.attack), granted, labels, self.case.seed, headers, *upstream, *code, *record_hashes, *model
        ]  # fmt: skip
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _variant_folder(folder: Path, variant_hash: str) -> Path:
    """Return `folder`, or `folder-VARIANT` where it holds the findings of another variant."""
    for path in sorted(folder.glob("*.safetensors")):
        with suppress(TranscriptError):  # a damaged finding is reported where it is scored
            if read_facts(path).get("variant") != variant_hash:
                return folder.with_name(f"{folder.name}-{variant_hash}")
    return folder


@cache
def _read_model_hash(path: Path, modified: int) -> tuple[dict[str, object], str | None]:
    """Read the metadata of a finding and the hash of its model; None where it claims no model.

    Many jobs build on one model, so each file is read once, until it is `modified` (nanoseconds).
    """
    finding, about = load_claim(path)
    return about, hash_state(finding.state) if isinstance(finding, LocalModel) else None


def _read_model(path: Path) -> State:
    finding, _ = load_finding(path)
    assert isinstance(finding, LocalModel)
    return finding.state


def _record_hashes(knowledge: Knowledge) -> list[str]:
    """Hash the tensors of all records that are granted."""
    hashes = []
    for table in knowledge.tables.values():
        for tensor in table.tensors.values():
            content = tensor.contiguous().numpy().tobytes()
            hashes.append(hashlib.sha256(content).hexdigest())
    return hashes


def _finding_version(about: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the version that made a finding, see `FindingCache.current_versions`."""
    return tuple(about.get(key) for key in ("variant", "code", "model_code"))
