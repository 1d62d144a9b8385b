"""Audit a stranger's private defense: what its hooks do beside what its accountant is told.

1. Say what the audit can and cannot find (`plan_audit`).
2. Probe claims: sampling, epsilon and delta (`claim_probes`).
3. Probe noise: its scale in each layer and its secrecy (`noise_probes`), its freshness
   (`claim_probes`).
4. Guess which of two neighbours a client has (`guessing_game`).
5. Say one sentence that is true of a broken program as well (`DefenseAudit.conclusion`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.base.errors import ConfigError, format_percent
from fedsim.base.randomness import seed_globals, use_one_thread
from fedsim.interfaces.defense import Defense
from fedsim.privacy.audited_defense import LAYERS, AuditedDefense
from fedsim.privacy.claim_probes import probe_accountant, probe_freshness, probe_sampling
from fedsim.privacy.guessing_game import CONFIDENCE, GameResult, describe_guesses, largest_epsilon, probe_guesses
from fedsim.privacy.ledger import guarantee_delta
from fedsim.privacy.noise_probes import ProbeResult, list_violations, probe_noise

FALSE_ALARMS = 1e-4
"""Probability that an audit says of a sound defense that it is broken."""
MIN_TRIALS = 100
"""Fewest trials: with fewer, guesses show no epsilon above 1.2 of unknown noise."""
NO_MECHANISM = "it declares no `mechanism`, so that its noise and sampling have nothing to be held against"


@dataclass(frozen=True, kw_only=True)
class DefenseAudit:
    """Results of an audit.

    Attributes:
        game: the best guesses.
        promised: epsilon that the defense promises for the probed steps and rounds.
        promised_of_game: likewise, for those of the guesses.
        trials: of each neighbour.
    """

    results: Sequence[ProbeResult]
    game: GameResult
    promised: float
    promised_of_game: float
    trials: int

    @property
    def violations(self) -> list[str]:
        """Return a sentence for each way in which the promise is broken."""
        return list_violations(self.results)

    @property
    def conclusion(self) -> str:
        """Return what the audit shows, in a sentence that holds of broken programs as well."""
        measured = (
            f"guesses show an epsilon of at least {self.game.best_epsilon:.3g} where {self.promised_of_game:.4g} is "
            f"promised, with a confidence of {format_percent(CONFIDENCE, '.5g')}"
        )
        if self.violations:
            return (
                f"The promise of epsilon = {self.promised:.4g} does not hold as it is stated: "
                f"{len(self.violations)} of {len(self.results)} probes found a violation, which they do of a "
                f"sound defense in at most {FALSE_ALARMS:g} of audits; {measured}."
            )
        return (
            f"No violation was found at epsilon = {self.promised:.4g} in {self.trials} trials of each neighbour, which "
            "does not prove that the program keeps its promise: a defect that shows in other layers, rounds, "
            f"settings, devices or earlier data alone would have been missed; {measured}."
        )


def plan_audit(audited: AuditedDefense, trials: int) -> list[str]:
    """Say before an audit what it can and cannot find."""
    if trials < MIN_TRIALS:
        raise ConfigError(
            f"--trials: {trials} trials show an epsilon of at most {largest_epsilon(trials):.3g} of unknown noise, "
            f"whatever the defense does; ask for at least {MIN_TRIALS}"
        )
    guessed = _choose_guessed(audited)
    delta = guarantee_delta(audited.defense)
    largest, promised_of_game = largest_epsilon(trials, guessed.mechanism, delta), _promised_epsilon(guessed)
    sentences = [
        f"Audited: `{audited.hook}` in {audited.releases} releases, with small and large inputs in each of "
        f"{len(LAYERS)} layers and in all of them; "
        f"{_promised_epsilon(audited):.4g} is the promised epsilon.",
        f"Guesses in {trials} trials of {guessed.releases} releases, of which {promised_of_game:.4g} is promised, can "
        f"show an epsilon of at most {largest:.3g}"
        + (
            ""
            if largest > promised_of_game
            else ", below the promised one: they can refute the promised curve, but not the epsilon itself"
        )
        + f"; {describe_guesses(guessed, trials, delta)}.",
    ]
    if audited.mechanism is None:
        sentences.append(f"Not seen: {NO_MECHANISM}; guesses alone are judged.")
    else:
        sentences.append(
            "Can be found: noise that is too small, missing in a layer or a number, dependent on data, used again or "
            "known to the server; another sampling or more releases than are accounted for; a wrong epsilon or delta."
        )
    sentences.append(
        "Cannot be found: what shows only after more rounds, for other shapes or settings, in other hooks, by rounding "
        "of floats, through time, N or metrics; nor a secret generator that is a weak one."
    )
    return sentences


def audit_defense(
    defense: Defense, *, trials: int = 1000, clients: int = 1, survivors: int | None = None, seed: int = 0
) -> DefenseAudit:
    """Audit a defense.

    Args:
        trials: of each of two neighbours, in which it is guessed which one a client has.
        clients: whose messages are summed before the server sees them, as secure aggregation does.
        survivors: how many of these send theirs; all by default.
    """
    audited = AuditedDefense.from_defense(defense, clients=clients, survivors=survivors, seed=seed)
    plan_audit(audited, trials)
    with seed_globals("defense audit"), use_one_thread():
        return _run_probes(audited, trials)


def _run_probes(audited: AuditedDefense, trials: int) -> DefenseAudit:
    """Make all probes, guesses last."""
    results = []
    mechanism, guessed = audited.mechanism, _choose_guessed(audited)
    if mechanism is None:
        results.append(ProbeResult(question="behaviour is as declared", unknown=NO_MECHANISM))
    else:
        results.append(probe_sampling(audited, mechanism))
        results.append(probe_accountant(audited))
        results.extend(probe_noise(audited, mechanism))
        results.append(probe_freshness(audited))
    guesses, game = probe_guesses(guessed, trials, guarantee_delta(audited.defense))
    results.append(guesses)
    return DefenseAudit(
        results=results,
        game=game,
        promised=_promised_epsilon(audited),
        promised_of_game=_promised_epsilon(guessed),
        trials=trials,
    )


def _choose_guessed(audited: AuditedDefense) -> AuditedDefense:
    """Return the client about which guesses are made.

    Without sampling, guesses tell most. Where a mechanism is declared, sampling has a probe of its own.
    """
    return audited if audited.mechanism is None else audited.with_full_batches()


def _promised_epsilon(audited: AuditedDefense) -> float:
    """Return the epsilon that is promised for the audited load."""
    guarantee = audited.defense.guarantee(audited.load, guarantee_delta(audited.defense))
    if guarantee is None:
        raise ConfigError(
            f"{type(audited.defense).__name__} promises nothing with these settings, so there is nothing to refute; "
            "choose settings with a guarantee, by --set"
        )
    return guarantee.epsilon
