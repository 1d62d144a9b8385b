"""What a run is made of, in one file; `fedsim inspect` compares everything else with it.

`manifest.json` names the run, its seed and settings, the hash of every recorded round's header (which has those of all
its states) with a chain over them, and the hashes of what was written beside the recording. It is replaced in one step
after each round and each finding. Without a key, anybody who can write to the folder can make it again; with a key
file, named by FEDSIM_KEY, it is signed (HMAC-SHA256).
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
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedsim.errors import ConfigError, RunError
from fedsim.files import hash_file, in_one_step, parse_json, refuse_link
from fedsim.recording.sealed import seal_of
from fedsim.recording.seals import check_seal, key, seal

NAME, GUARD = "manifest.json", ".manifest.lock"
SEALED = "checkpoint.safetensors"
_FORMAT = 1
_OF_AN_APP = re.compile(r"run-\d+")
_written: dict[Path, tuple[bytes, bytes | None, Manifest]] = {}
"""What this process wrote last, with which key, by path; it saves parsing thousands of rounds again."""


@dataclass(kw_only=True)
class Manifest:
    """What a run is made of.

    Attributes:
        run: its id, drawn when it was begun.
        name: what its folder was called then; a signature says so of a run that takes the place of another.
        seed: of its federation; None where that is not known.
        settings: of its experiment, by `table.key`; None where it was recorded elsewhere.
        data: SHA-256 of the examples and of who holds which; empty where nobody noted it.
        code: hash of the code of each part of its federation that is of another package than fedsim, by table.
        rounds: number of each recorded round to the SHA-256 of its header.
        chain: SHA-256 of the chain's last link and of the header after it, round by round.
        files: path in the run folder to SHA-256.
        replaced: SHA-256 of what a file was before, for those that are announced before they are replaced: a writer who
            is killed in between leaves the former one.
        late: whether it was begun when there were rounds or findings already; it does not say where those are from.
        signed: whether it was signed; not part of what is written.
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

    def names(self, file: str, digest: str) -> bool:
        """Whether a file of the run has to be, or may still be, the one with this hash."""
        return digest in (self.files.get(file), self.replaced.get(file))

    def add_round(self, number: int, header: str) -> None:
        """Note the hash of the header of a round, the last one or one that was recorded again."""
        if not self.rounds or number > int(next(reversed(self.rounds))):
            self.rounds[str(number)] = header
            self.chain = _link(self.chain, header)
        elif self.rounds.get(str(number)) != header:
            self.rounds[str(number)] = header
            self.rounds = dict(sorted(self.rounds.items(), key=lambda item: int(item[0])))
            self.chain = chained(self.rounds)


def chained(rounds: Mapping[str, str]) -> str:
    """The last link of the chain over these rounds."""
    last = ""
    for header in rounds.values():
        last = _link(last, header)
    return last


def _link(before: str, header: str) -> str:
    return hashlib.sha256(f"{before}{header}".encode()).hexdigest()


def start(folder: Path) -> None:
    """Begin a run in `folder`: a manifest that names nothing yet."""
    with _guarded(folder):
        _write(folder, Manifest(name=name_of_run(folder)), durable=False)


@contextmanager
def changing(folder: Path, *, durable: bool = False) -> Iterator[Manifest]:
    """The manifest of the run in `folder`, or a new one, to be changed; it is written in one step on leaving.

    Raises:
        ConfigError: it is signed and FEDSIM_KEY names no key, or the other way round.
        RunError: it was altered, or cannot be written.
    """
    with _guarded(folder):
        manifest = read(folder) or Manifest(name=name_of_run(folder), signed=key() is not None)
        check_key(folder, manifest)
        _written.clear()  # until what is changed now has been written
        yield manifest
        _forget_replaced(folder, manifest)
        _write(folder, manifest, durable=durable)


def _forget_replaced(folder: Path, manifest: Manifest) -> None:
    """Forget the former hash of each file that has become what was announced."""
    for name in list(manifest.replaced):
        if _hash_now(folder / name) == manifest.files.get(name):
            del manifest.replaced[name]


def _hash_now(path: Path) -> str | None:
    """None where there is no file, or a damaged one."""
    try:
        return file_hash(path)
    except RunError:
        return None


def check_key(folder: Path, manifest: Manifest) -> None:
    """Raise ConfigError unless what is signed can be signed again, and only that."""
    if manifest.signed and key() is None:
        raise ConfigError(f"{folder}: the run is signed, so what changes it has to sign it again; give --key FILE")
    if key() is not None and not manifest.signed:
        raise ConfigError(
            f"{folder}: the run was begun without a key, and a key proves nothing about what was there before; "
            "leave --key out, or begin another run with it"
        )


def note(folder: Path, *paths: Path) -> None:
    """Note the hashes of files of the run in `folder` as they are now."""
    hashes = {name_of(folder, path): file_hash(path) for path in paths}
    known = read(folder)
    if known is None or hashes.items() - known.files.items():
        with changing(folder) as manifest:
            manifest.files |= hashes


def announce(folder: Path, path: Path, digest: str) -> None:
    """Note the hash that a file is about to have; until it has it, the one that it has now is right as well."""
    name = name_of(folder, path)
    with changing(folder) as manifest:
        now = _hash_now(path)
        if now is not None and manifest.names(name, now):
            manifest.replaced[name] = now
        manifest.files[name] = digest


def is_noted(folder: Path, path: Path) -> bool:
    """Whether a file of the run is the one that was noted."""
    manifest = read(folder)
    return manifest is not None and manifest.names(name_of(folder, path), file_hash(path))


def file_hash(path: Path) -> str:
    """SHA-256 of a file; of a sealed one the hash that it holds, because it may be large and change every round.

    Raises:
        RunError: it cannot be read.
    """
    try:
        return seal_of(path) if path.name == SEALED else hash_file(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error


def name_of_run(folder: Path) -> str:
    """What the folder of a run is called; one of an app's recording, such as `run-1`, with the folder around it."""
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}" if _OF_AN_APP.fullmatch(path.name) else path.name


def name_of(folder: Path, path: Path) -> str:
    """What a file of the run is called in its manifest."""
    return path.relative_to(folder).as_posix()


def read(folder: Path) -> Manifest | None:
    """The manifest of the run in `folder`, None where there is none.

    Where FEDSIM_KEY names a key, the signature of a signed one is checked.

    Raises:
        RunError: it was altered, or is signed with another key.
    """
    path = folder / NAME
    if not os.path.lexists(path):
        return None
    refuse_link(path)
    secret = key()
    try:
        whole = path.read_bytes() if path.is_file() else b""
        known = _written.get(path)
        if known and known[:2] == (whole, secret):
            return known[2]
        content = parse_json(whole)
        body = content["manifest"]
        text = _text(body)
        manifest = _ADAPTER.validate_python(body)
        if manifest.format != _FORMAT or not all(number.isdecimal() for number in manifest.rounds):
            raise ValueError(f"it has format {manifest.format}, expected {_FORMAT}")
        manifest.signed = check_seal(content["seal"], text, secret)
    except ValidationError as error:
        raise RunError(f"{path}: was altered ({error.errors()[0]['msg']}); nothing vouches for the run") from error
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{path}: was altered ({reason}); nothing vouches for the run") from error
    return manifest


def _write(folder: Path, manifest: Manifest, *, durable: bool) -> None:
    secret = key()
    manifest.signed = secret is not None
    text = _text({name: value for name, value in vars(manifest).items() if name != "signed"})
    whole = f'{{"seal": {json.dumps(seal(text, secret))},\n"manifest": {text}}}\n'.encode()
    try:
        with in_one_step(folder / NAME, durable=durable) as temporary:
            temporary.write_bytes(whole)
    except OSError as error:
        raise RunError(f"{folder / NAME}: cannot be written ({error.strerror}); make room and try again") from error
    _written[folder / NAME] = whole, secret, manifest


def _text(body: Any) -> str:
    return json.dumps(body, separators=(",\n", ": "))


@contextmanager
def _guarded(folder: Path) -> Iterator[None]:
    """One process at a time changes the manifest: attacks in the round loop are another than the round loop.

    Raises:
        RunError: the folder cannot be written.
    """
    path = folder / GUARD
    refuse_link(path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); make room and try again") from error
    try:
        with suppress(OSError):  # where the file system knows no locks, `fedsim.experiments.lock` has said so
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


_ADAPTER = TypeAdapter(Manifest)
