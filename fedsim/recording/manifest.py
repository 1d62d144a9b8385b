"""Manifest of a run: the hashes of all other files, which `fedsim inspect` checks.

`manifest.json` names the run, its seed and settings, the hash of every recorded round's header
(which has the hashes of all its states) with a chain over them, and the hashes of the other files.
It is replaced in one step after each round and each finding. Without a key, anybody who can write
to the folder can make it again; with a key file, named by FEDSIM_KEY, it is signed (HMAC-SHA256).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedsim.base.errors import ConfigError, RunError
from fedsim.base.files import check_no_link, hash_file, parse_json, replace_atomically, write_remedy
from fedsim.recording.sealed_files import read_seal
from fedsim.recording.seals import check_seal, seal_text, signing_key

MANIFEST_FILE, LOCK_FILE = "manifest.json", ".manifest.lock"
SEALED_FILE = "checkpoint.safetensors"
_FORMAT = 1
_APP_RUN_FOLDER = re.compile(r"run-\d+")


@dataclass(kw_only=True)
class Manifest:
    """Contents of a run: its settings, and the hashes of its rounds and files.

    Attributes:
        run: its id, drawn when it was begun.
        name: name of its folder then; with a signature, it reveals a run that was moved in place of
            another.
        seed: seed of its federation; None where it is not known.
        settings: settings of its experiment by `table.key`; None where it was recorded elsewhere.
        data: SHA-256 of the examples and of their partition; empty where it was not noted.
        code: table to the hash of the code of plug-ins that are of another package than fedsim.
        rounds: number of each recorded round to the SHA-256 of its header.
        chain: SHA-256 of the chain's last link and of the header after it, round by round.
        files: path in the run folder to SHA-256.
        replaced: path to former SHA-256, for files whose new hash is announced before they are
            replaced: a writer that is killed in between leaves the former file.
        late: whether the manifest was begun after rounds or findings, whose origin it then does not
            prove.
        signed: whether it was signed; this is not written.
    """

    format: int = _FORMAT
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    name: str = ""
    seed: int | None = None
    settings: dict[str, Any] | None = None
    data: str = ""
    code: dict[str, str] = field(default_factory=dict)
    rounds: dict[str, str] = field(default_factory=dict)
    chain: str = ""
    files: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    late: bool = False
    signed: bool = False

    def allows(self, file: str, digest: str) -> bool:
        """Return whether a file of the run may have this hash, the announced or the former one."""
        return digest in (self.files.get(file), self.replaced.get(file))

    def add_round(self, number: int, header: str) -> None:
        """Note the hash of the header of a new round, or of one that was recorded again."""
        if not self.rounds or number > int(next(reversed(self.rounds))):
            self.rounds[str(number)] = header
            self.chain = _append_link(self.chain, header)
        elif self.rounds.get(str(number)) != header:
            self.rounds[str(number)] = header
            self.rounds = dict(sorted(self.rounds.items(), key=lambda item: int(item[0])))
            self.chain = chain_hash(self.rounds)


def chain_hash(rounds: Mapping[str, str]) -> str:
    """Return the last link of the hash chain over these rounds."""
    last_link = ""
    for header in rounds.values():
        last_link = _append_link(last_link, header)
    return last_link


def _append_link(last_link: str, header: str) -> str:
    return hashlib.sha256(f"{last_link}{header}".encode()).hexdigest()


class ManifestFile:
    """The manifest of the run in a folder, read and verified once, when it is first asked for.

    Other processes may write it as well, such as attacks in the round loop. So `edit` takes in what
    they wrote, and nothing is said not to be of the run before the disk was asked again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / MANIFEST_FILE
        self._last_read: tuple[bytes | None, Manifest | None] | None = None
        self._is_current = False

    @property
    def contents(self) -> Manifest | None:
        """Return the manifest; None where there is none.

        Where FEDSIM_KEY names a key, the signature of a signed one is checked.

        Raises:
            RunError: it was altered, or is signed with another key.
        """
        return self._last_read[1] if self._last_read and self._is_current else self.read_again()

    def read_again(self) -> Manifest | None:
        """Return the manifest that is on the disk now, see `contents`.

        It is verified again only where somebody else has replaced it.
        """
        content = self._read_bytes()
        if self._last_read is None or self._last_read[0] != content:
            self._last_read = content, None if content is None else self._parse(content)
        self._is_current = True
        return self._last_read[1]

    def expire(self) -> None:
        """Have the disk asked again, because somebody else may have written."""
        self._is_current = False

    def start(self) -> None:
        """Write an empty manifest for a new run."""
        with _lock(self.folder):
            self._write(Manifest(name=run_name(self.folder)), durable=False)

    @contextmanager
    def edit(self, *, durable: bool = False) -> Iterator[Manifest]:
        """Yield the manifest on the disk, or a new one, and write its changes on leaving.

        Raises:
            ConfigError: it is signed and FEDSIM_KEY names no key, or the other way round.
            RunError: it was altered, or cannot be written.
        """
        with _lock(self.folder):
            manifest = self.read_again() or Manifest(name=run_name(self.folder), signed=self._key is not None)
            self.check_key(manifest)
            self._last_read = None  # until the changes are written, the manifest differs from the file
            yield manifest
            for name in list(manifest.replaced):
                if _hash_or_none(self.folder / name) == manifest.files.get(name):
                    del manifest.replaced[name]  # the file has the announced hash by now
            self._write(manifest, durable=durable)

    def note(self, *paths: Path) -> None:
        """Note the present hashes of files of the run."""
        hashes = {self._name(path): file_hash(path) for path in paths}
        manifest = self.read_again()
        if manifest is None or hashes.items() - manifest.files.items():
            with self.edit() as changed:
                changed.files |= hashes

    def announce(self, path: Path, digest: str) -> None:
        """Note the hash that a file is about to have; its present hash stays valid until then."""
        name = self._name(path)
        with self.edit() as manifest:
            present = _hash_or_none(path)
            if present is not None and manifest.allows(name, present):
                manifest.replaced[name] = present
            manifest.files[name] = digest

    def vouches_for(self, path: Path) -> bool:
        """Return whether a file of the run has the hash that the manifest names."""
        name, digest = self._name(path), file_hash(path)
        manifest = self.contents
        if manifest is None or not manifest.allows(name, digest):
            manifest = self.read_again()  # another process may have noted it meanwhile
        return manifest is not None and manifest.allows(name, digest)

    def check_key(self, manifest: Manifest) -> None:
        """Raise ConfigError unless a key is given for a signed manifest, and none for another."""
        if manifest.signed and self._key is None:
            raise ConfigError(
                f"{self.folder}: the run is signed, so what changes it has to sign it again; give --key FILE"
            )
        if self._key is not None and not manifest.signed:
            raise ConfigError(
                f"{self.folder}: the run was begun without a key, and a key proves nothing about what was "
                "there before; leave --key out, or begin another run with it"
            )

    @cached_property
    def _key(self) -> bytes | None:
        return signing_key()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _read_bytes(self) -> bytes | None:
        """Return what is in the file; None where there is none, no bytes where it is no file."""
        if not os.path.lexists(self.path):
            return None
        check_no_link(self.path)
        try:
            return self.path.read_bytes() if self.path.is_file() else b""
        except OSError as error:
            raise _alteration_error(self.path, error.strerror) from error

    def _parse(self, content: bytes) -> Manifest:
        try:
            fields = parse_json(content)
            body = fields["manifest"]
            manifest = _ADAPTER.validate_python(body)
            if manifest.format != _FORMAT or not all(number.isdecimal() for number in manifest.rounds):
                raise ValueError(f"it has format {manifest.format}, expected {_FORMAT}")
            for name in (*manifest.files, *manifest.replaced):
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    raise ValueError("it names a file outside of the run")
            manifest.signed = check_seal(fields["seal"], _to_text(body), self._key)
        except ValidationError as error:
            raise _alteration_error(self.path, error.errors()[0]["msg"]) from error
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise _alteration_error(self.path, error) from error
        return manifest

    def _write(self, manifest: Manifest, *, durable: bool) -> None:
        manifest.signed = self._key is not None
        text = _to_text({name: value for name, value in vars(manifest).items() if name != "signed"})
        content = f'{{"seal": {json.dumps(seal_text(text, self._key))},\n"manifest": {text}}}\n'.encode()
        try:
            with replace_atomically(self.path, durable=durable) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot be written ({error.strerror}); {write_remedy(error)} and try again"
            ) from error
        self._last_read, self._is_current = (content, manifest), True


def _alteration_error(path: Path, reason: object) -> RunError:
    return RunError(f"{path}: was altered ({reason}); nothing vouches for the run")


def _hash_or_none(path: Path) -> str | None:
    """Return the hash of a file; None where there is none, or it is damaged."""
    try:
        return file_hash(path)
    except RunError:
        return None


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file; of a sealed file, the hash that it holds.

    A sealed file may be large and change in every round.
    """
    try:
        return read_seal(path) if path.name == SEALED_FILE else hash_file(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error


def run_name(folder: Path) -> str:
    """Return the name of a run's folder; one of an app, such as `run-1`, with its parent folder."""
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}" if _APP_RUN_FOLDER.fullmatch(path.name) else path.name


def _to_text(body: Any) -> str:
    return json.dumps(body, separators=(",\n", ": "))


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one process at a time change the manifest; in-round attacks run beside the round loop."""
    path = folder / LOCK_FILE
    check_no_link(path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); {write_remedy(error)} and try again") from error
    try:
        # If the file system has no locks, `fedsim.federation.lock` has warned of it.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


_ADAPTER = TypeAdapter(Manifest)
