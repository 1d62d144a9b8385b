"""A hash over a text, signed by whoever has the key that FEDSIM_KEY names."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from fedsim.errors import ConfigError

KEY = "FEDSIM_KEY"
_SHORTEST = 16
"""Bytes of a key."""
_HASH, _SIGNATURE = "sha256", "hmac-sha256"


def key() -> bytes | None:
    """What is signed with: the content of the file that FEDSIM_KEY names; None where it names none.

    Raises:
        ConfigError: the file cannot be read, or is too short for a secret.
    """
    named = os.environ.get(KEY)
    if not named:
        return None
    try:
        secret = Path(named).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--key {named}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(secret) < _SHORTEST:
        raise ConfigError(
            f"--key {named}: expected a secret of {_SHORTEST} bytes or more, got {len(secret)}; "
            f"`head -c 32 /dev/urandom > {named}` makes one"
        )
    return secret


def seal(text: str, secret: bytes | None) -> dict[str, str]:
    """The SHA-256 of `text`, and its signature where there is a key."""
    found = {_HASH: hashlib.sha256(text.encode()).hexdigest()}
    return found if secret is None else found | {_SIGNATURE: _signature(secret, text)}


def check_seal(given: Mapping[str, str], text: str, secret: bytes | None) -> bool:
    """Whether `text` is signed; with a key, by that key.

    Raises:
        ValueError: it is not what was sealed, or is signed with another key.
        KeyError: there is no hash.
    """
    if given[_HASH] != hashlib.sha256(text.encode()).hexdigest():
        raise ValueError("its bytes are not those that were written")
    if _SIGNATURE not in given:
        return False
    if secret is not None and not hmac.compare_digest(_signature(secret, text), str(given[_SIGNATURE])):
        raise ValueError("it is not signed with this key")
    return True


def check_signed(given: Mapping[str, str], text: str) -> None:
    """As `check_seal` by the key that there is; where there is one, what is not signed is refused as well.

    Raises:
        ConfigError: the key cannot be read.
        ValueError: `text` is not what was sealed, or not by this key.
        KeyError: there is no hash.
    """
    secret = key()
    if not check_seal(given, text, secret) and secret is not None:
        raise ValueError("it is not signed")


def _signature(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
