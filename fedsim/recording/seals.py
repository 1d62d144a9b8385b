"""Seal of a text: its SHA-256, signed with the key that FEDSIM_KEY names, if it names one."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from fedsim.base.errors import ConfigError

KEY_VARIABLE = "FEDSIM_KEY"
_MIN_KEY_BYTES = 16
_HASH, _SIGNATURE = "sha256", "hmac-sha256"


def signing_key() -> bytes | None:
    """Return the content of the file that FEDSIM_KEY names, as the key; None where it names none."""
    path = os.environ.get(KEY_VARIABLE)
    if not path:
        return None
    try:
        secret = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--key {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(secret) < _MIN_KEY_BYTES:
        raise ConfigError(
            f"--key {path}: expected a secret of {_MIN_KEY_BYTES} bytes or more, got {len(secret)}; "
            f"`head -c 32 /dev/urandom > {path}` makes one"
        )
    return secret


def seal_text(text: str, secret: bytes | None) -> dict[str, str]:
    """Return the SHA-256 of `text`, and its signature where there is a key.

    >>> sorted(seal_text("text", None)), sorted(seal_text("text", b"a secret of 16 b"))
    (['sha256'], ['hmac-sha256', 'sha256'])
    """
    text_seal = {_HASH: hashlib.sha256(text.encode()).hexdigest()}
    return text_seal if secret is None else text_seal | {_SIGNATURE: _signature(secret, text)}


def check_seal(given: Mapping[str, str], text: str, secret: bytes | None) -> bool:
    """Check the seal `given` of `text`, and return whether it is signed.

    Args:
        secret: the key that a signature is checked with; None accepts any signature.
    """
    if given[_HASH] != hashlib.sha256(text.encode()).hexdigest():
        raise ValueError("its bytes are not those that were written")
    if _SIGNATURE not in given:
        return False
    if secret is not None and not hmac.compare_digest(_signature(secret, text), str(given[_SIGNATURE])):
        raise ValueError("it is not signed with this key")
    return True


def require_seal(given: Mapping[str, str], text: str) -> None:
    """Check the seal `given` of `text` with the present key; if there is one, require a signature."""
    secret = signing_key()
    if not check_seal(given, text, secret) and secret is not None:
        raise ValueError("it is not signed")


def _signature(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
