"""What can go wrong, by what its reader can do about it.

FedsimError                     anything fedsim says in one sentence
├── ConfigError (ValueError)        a key, name, type or combination in the experiment file
│   └── TrustError                      a run folder names code that would be imported, and nobody said to trust it
├── PluginError (LookupError)       a name nobody registered, or a plug-in that does not load
├── InstallationError (ImportError) a room is shadowed, or an extra is not installed
├── KnowledgeError                  the threat model withholds what an attack needs
├── DataError                       a data set is missing, damaged or does not fit
├── PayloadError                    what a client sent is no payload
├── TranscriptError                 a recording is unreadable, damaged or of another model
├── AttackError                     an attack cannot work on this update, or diverged
│   └── AttackCrash                     it raised something that is no sentence; the log has the traceback
└── RunError                        a run cannot go on; what was recorded stays usable

Messages read "where: what was wrong, expected, got; what to do", lower case, no full stop.
`exit_code` is what the command line returns: 2 when nothing was started, 1 when work failed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_REASON = 300
"""Most letters that are kept of what a stranger's code says."""


class FedsimError(Exception):
    """Base of everything fedsim reports in one sentence."""

    exit_code = 1


class ConfigError(FedsimError, ValueError):
    """The experiment file asks for something that does not exist or contradicts itself."""

    exit_code = 2


class TrustError(ConfigError):
    """A file in a run folder names code of its own, and the user has not said to trust its author."""


class PluginError(FedsimError, LookupError):
    """No plug-in has this name, two have it, or it does not load."""

    exit_code = 2


class InstallationError(FedsimError, ImportError):
    """This copy of fedsim is shadowed by another package, or lacks an optional part."""

    exit_code = 2


class KnowledgeError(FedsimError):
    """The threat model withholds something that the attack declared it needs."""

    exit_code = 2


class DataError(FedsimError):
    """A data set is not where it was looked for, or is not what it should be."""

    exit_code = 2


class PayloadError(FedsimError):
    """What a client sent is in none of the forms of a payload, or does not fit what was broadcast."""


class TranscriptError(FedsimError):
    """A recording cannot be read, is damaged, or belongs to another model."""


class AttackError(FedsimError):
    """An attack cannot work on this update, or its optimisation diverged."""


class AttackCrash(AttackError):
    """An attack raised something else than a FedsimError, which is the cause of this, or its process died."""


class RunError(FedsimError):
    """The run cannot go on. Rounds already recorded stay usable."""


def first_line(error: BaseException) -> str:
    """Of what a stranger's exception says, or its type where it says nothing; no full stop."""
    text = str(error).strip()
    return one_line(text.splitlines()[0]).rstrip(".") if text else type(error).__name__


def one_line(text: str) -> str:
    """A stranger's `text` for screens and files: one line, not too long, and nothing that a terminal would obey."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    shown = " ".join(shown.split())
    return shown if len(shown) <= LONGEST_REASON else f"{shown[: LONGEST_REASON - 1]}…"


def what_it_said(error: BaseException) -> str:
    """Why a stranger's code ended: the sentence of a FedsimError, or else the exception's type and text."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    return str(error) if isinstance(error, FedsimError) else f"{type(error).__name__}: {error}"


def some_of(things: Iterable[object], most: int, separator: str = ", ") -> str:
    """The first `most` of these, and how many more there are."""
    told = [str(thing) for thing in things]
    return separator.join(told[:most]) + (f" and {len(told) - most} more" if len(told) > most else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A remark that offers the nearest known name, or lists them all."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known: {', '.join(names)}" if names else "there are none"
