"""The errors that fedsim reports, by their remedies.

FedsimError                     any error that fedsim reports in one sentence
├── ConfigError (ValueError)        a wrong key, name, type or combination in the experiment file
│   └── TrustError                      a run folder names code that nobody said to trust
├── PluginError (LookupError)       an unknown name, or a plug-in that does not load
├── InstallationError (ImportError) a package is shadowed, or an extra is not installed
├── KnowledgeError                  the threat model withholds a fact that an attack needs
├── DataError                       a data set is missing, damaged or does not fit
├── PayloadError                    a client's message is not a payload
├── TranscriptError                 a recording is unreadable, damaged or of another model
├── AttackError                     an attack cannot work on this update, or diverged
│   └── AttackCrash                     an attack raised an unexpected error; see the log
└── RunError                        a run cannot go on; recorded rounds stay usable

Messages read "where: what was wrong, expected, got; what to do", lower case, no full stop.
Functions inside pass these on, and their docstrings name those alone that a caller tells apart from others.
`exit_code` is what the command line returns: 2 when nothing was started, 1 when work failed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MAX_REASON_LENGTH = 300
"""Greatest number of letters that is kept of an error of other people's code."""


class FedsimError(Exception):
    """Base of all errors that fedsim reports in one sentence."""

    exit_code = 1


class ConfigError(FedsimError, ValueError):
    """The experiment file asks for something that does not exist or contradicts itself."""

    exit_code = 2


class TrustError(ConfigError):
    """A run folder names code of its own, and the user has not said to trust its author."""


class PluginError(FedsimError, LookupError):
    """No plug-in has this name, two have it, or it does not load."""

    exit_code = 2


class InstallationError(FedsimError, ImportError):
    """This copy of fedsim is shadowed by another package, or lacks an optional part."""

    exit_code = 2


class KnowledgeError(FedsimError):
    """The threat model withholds a fact that the attack needs."""

    exit_code = 2


class DataError(FedsimError):
    """A data set is missing, damaged, or does not fit the experiment."""

    exit_code = 2


class PayloadError(FedsimError):
    """A client's message has none of the forms of a payload, or does not fit the broadcast."""


class TranscriptError(FedsimError):
    """A recording cannot be read, is damaged, or belongs to another model."""


class AttackError(FedsimError):
    """An attack cannot work on this update, or its optimisation diverged."""


class AttackCrash(AttackError):
    """An attack raised another error than a FedsimError (the cause), or its process died."""


class RunError(FedsimError):
    """The run cannot go on. Rounds already recorded stay usable.

    Attributes:
        failures: where it went on to its end, one sentence for each attack, score or picture that failed.
    """

    failures: tuple[str, ...] = ()


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text without a full stop, or its type."""
    text = str(error).strip()
    return one_line(text.splitlines()[0]).rstrip(".") if text else type(error).__name__


def describe_error(error: BaseException) -> str:
    """Return the type of an exception, with the first line of its text if it has one.

    >>> describe_error(ValueError("no such column.")), describe_error(ValueError())
    ('ValueError: no such column', 'ValueError')
    """
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name


def is_memory_error(error: BaseException) -> bool:
    """Return whether the memory of a device did not last, without an import of torch."""
    found = _find_device_error(error)
    return found is not None and _is_out_of_memory(found)


def is_device_failure(error: BaseException) -> bool:
    """Return whether a device is to blame for an error: it was lost, or its memory did not last.

    An assertion that fails on a device, as of an index out of range, is the fault of the code that runs there.
    """
    found = _find_device_error(error)
    return found is not None and "device-side assert" not in str(found)


def ends_training(error: BaseException) -> bool:
    """Return whether an error stops all clients, not one: after an assertion, too, a device computes no more."""
    return _find_device_error(error) is not None


def _find_device_error(error: BaseException | None) -> BaseException | None:
    """Return the first error of a device among an error and those that it was raised from, or while they were handled.

    Anybody's code may have caught the device's own and raised another.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:
        if _is_out_of_memory(error) or "AcceleratorError" in _torch_classes(error):
            return error
        if isinstance(error, RuntimeError) and "CUDA error" in str(error):
            return error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    return "OutOfMemoryError" in _torch_classes(error)


def _torch_classes(error: BaseException) -> set[str]:
    return {base.__name__ for base in type(error).__mro__ if base.__module__.startswith("torch")}


def one_line(text: str) -> str:
    r"""Return untrusted `text` as one short line without control characters.

    >>> one_line("loss:  nan\x1b[2J\nstop")
    'loss: nan [2J stop'
    """
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    line = " ".join(printable.split())
    return line if len(line) <= MAX_REASON_LENGTH else f"{line[: MAX_REASON_LENGTH - 1]}…"


def error_reason(error: BaseException) -> str:
    """Return the reason why code ended: a FedsimError's text, else the type and text."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    return str(error) if isinstance(error, FedsimError) else f"{type(error).__name__}: {error}"


def plugin_exit_error(error: SystemExit) -> PluginError:
    """Return the error of a plug-in that ended the program while the experiment was made of it."""
    return PluginError(f"the experiment cannot be made, a plug-in ended the program ({error_reason(error)})")


def join_first(things: Iterable[object], most: int, separator: str = ", ") -> str:
    """Return the first `most` things as text, and the number of the others."""
    texts = [str(thing) for thing in things]
    text = separator.join(texts[:most])
    return f"{text} and {len(texts) - most} more" if len(texts) > most else text


_LEAST_SIMILARITY = 0.6
"""Least ratio of difflib of a name that is proposed; below it, names have little but single letters in common."""


def number_of(count: int, noun: str) -> str:
    """Return a count with its noun: `1 round`, or `3 rounds`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_percent(share: float, precision: str = ".1f") -> str:
    """Format a share as a percentage, by default with one decimal.

    >>> format_percent(0.125), format_percent(0.5, ".0f")
    ('12.5 %', '50 %')
    """
    return f"{100 * share:{precision}} %"


def name_rounds(rounds: str | int) -> str:
    """Name attacked rounds in a sentence, by what a column `round` has.

    >>> name_rounds("2"), name_rounds("1-5 by 2")
    ('round 2', 'rounds 1-5 by 2')
    """
    return f"{'round' if str(rounds).partition(',')[0].isdigit() else 'rounds'} {rounds}"


def list_rounds(rounds: Sequence[int | str]) -> str:
    """Name rounds one by one in a sentence.

    >>> list_rounds([3]), list_rounds([1, 3, 4])
    ('round 3', 'rounds 1, 3, 4')
    """
    return f"{'rounds' if len(rounds) > 1 else 'round'} {', '.join(map(str, rounds))}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a remark with the most similar known name, or with all of them.

    >>> did_you_mean("fedavgm", ["fedavg", "fedprox"])
    "did you mean 'fedavg'?"
    """
    names = sorted(known)
    similar = difflib.get_close_matches(name, names, n=1, cutoff=_LEAST_SIMILARITY)
    if similar:
        return f"did you mean '{similar[0]}'?"
    return f"known: {', '.join(names)}" if names else "there are none"
