"""What an audit with so many canaries or trials can find, said before it runs.

An audit finds a program that has less noise than it declares if guesses get right what the declared
mechanism would hardly let them. How little noise that takes follows from the trade-off curve with scaled noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedsim.base.errors import format_percent
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.canary_bounds import GUESS_SHARES, choose_curve_tests, lower_bound
from fedsim.privacy.ceilings import compute_trade_off
from fedsim.privacy.curve_audit import (
    count_guesses,
    curve_lower_bound,
    expect_bound,
    expect_right_guesses,
    scale_noise,
)

_NOISE_SHARES = (0.9, 0.75, 0.5, 0.25, 0.1, 0.05)
"""Shares of the declared noise that are tried."""
_DEVIATIONS = 2.0
"""By how many standard deviations fewer guesses than on average are right in what an audit surely finds."""


def find_refuted_share(is_refuted: Callable[[float], bool]) -> float:
    """Return the largest share of the declared noise that an audit refutes; 0 where it refutes none.

    >>> find_refuted_share(lambda share: share < 0.42)
    0.25
    """
    low, high = 0, len(_NOISE_SHARES)
    while low < high:
        middle = (low + high) // 2
        if is_refuted(_NOISE_SHARES[middle]):
            high = middle
        else:
            low = middle + 1
    return _NOISE_SHARES[low] if low < len(_NOISE_SHARES) else 0.0


def describe_canaries(
    mechanisms: Sequence[Mechanism], canaries: int, proved: float, delta: float, confidence: float
) -> tuple[str, bool]:
    """Say what canaries can find, and whether that is anything at all.

    Args:
        mechanisms: all that they will pass, as declared; empty where nothing is.
        canaries: m.
        proved: epsilon.
        delta: at which it is proved.
        confidence: of the bound, in (0, 1).

    Returns:
        The sentence, and whether some program could be refuted.

    >>> sentence, _ = describe_canaries([Mechanism(scale=1.0)], 2000, 4.38, 1e-5, 0.95)
    >>> sentence
    '2000 canaries show about 2.2 of 4.38 where the program is sound, and refute it if it has 25 % of the noise'
    >>> describe_canaries([Mechanism(scale=1.0)], 20, 4.38, 1e-5, 0.95)[1]
    False
    """
    if not mechanisms or compute_trade_off(mechanisms, replaced=False) is None:
        most = lower_bound(canaries, canaries, canaries, delta, 1 - (1 - confidence) / len(GUESS_SHARES))
        sentence = (
            f"{canaries} canaries show an epsilon of at most {most:.3g} of {proved:.4g}, whatever the program does"
        )
        return sentence, most > proved
    # How much less noise would be noticed.
    tests = choose_curve_tests(mechanisms, canaries, delta, confidence)

    def is_refuted(noise_share: float) -> bool:
        quieter = scale_noise(mechanisms, noise_share)
        for share, test_confidence in tests:
            right = expect_right_guesses(quieter, canaries, share, _DEVIATIONS)
            guesses = count_guesses(canaries, share)
            if curve_lower_bound(mechanisms, canaries, guesses, right, delta, test_confidence) > proved:
                return True
        return False

    largest = find_refuted_share(is_refuted)
    (chosen_share, chosen_confidence), _ = tests
    shown = expect_bound(tuple(mechanisms), canaries, chosen_share, delta, chosen_confidence)
    if not largest:
        return (
            f"{canaries} canaries refute nothing, not even {format_percent(_NOISE_SHARES[-1], '.0f')} of the noise "
            f"that {proved:.4g} is proved of",
            False,
        )
    return (
        f"{canaries} canaries show about {shown:.2g} of {proved:.4g} where the program is sound, and refute it if it "
        f"has {format_percent(largest, '.0f')} of the noise",
        True,
    )
