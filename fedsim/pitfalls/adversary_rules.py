"""Pitfalls of the adversary: what it knows, and whom it attacks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fedsim.base.errors import number_of
from fedsim.federation.adversary_tables import AttackTable
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.federated_data import GUESSED_EXAMPLES
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.knowledge import FACTS
from fedsim.interfaces.metric import describe_metric
from fedsim.inversion.matching import GradientInversion
from fedsim.pitfalls.design import EvaluationDesign
from fedsim.pitfalls.pitfall import PitfallRule, Symptom
from fedsim.report.verdicts import MIN_VICTIMS

_DECIDED_BY_ONE = ("matches", "candidates")
"""Evidence that reaches a verdict from one victim on, see `fedsim.interfaces.metric.Evidence`."""
_CLIENTS = 10
"""Clients of a federation in counter-experiments."""


def _is_granted(spec: AttackFile, fact: str) -> bool:
    return getattr(spec.adversary.knowledge, fact) is not False


def _message_attack(attacks: Collection[Attack]) -> dict[str, Any]:
    """Return the table of an attack that reads messages alone; that on numbers adapts to defenses."""
    return {"name": "tgias-ro-text" if any(attack.subject == "texts" for attack in attacks) else "inverting-gradients"}


class NaiveAttacks(PitfallRule):
    """No attack on a defense but by an adversary that does not know it."""

    name = "naive-attacks"
    title = "only naive attacks on a defense"
    reason = "An adaptive adversary, who knows the defense, may succeed where others fail."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the defenses where no attack adapts to any of them."""
        defended = [(config, attacks) for config, attacks in design.attacked_configs if config.defense]
        if not defended or any(_is_adaptive(config, attacks) for config, attacks in defended):
            return None
        names = ", ".join(dict.fromkeys(table.name for config, _ in defended for table in config.defense))
        changes: dict[str, Any] = {"adversary": {"knowledge": {"defenses": True}}}
        granted = any(_is_granted(config, "defenses") for config, _ in defended)
        missing = "no attack reads the defenses" if granted else "adversary.knowledge.defenses is not granted"
        config, attacks = defended[0]
        if not any(_reads_defenses(attacks) for _, attacks in defended):
            if any(attack.subject == "texts" for attack in attacks):
                return None  # no attack on texts adapts to defenses, so that there is nothing to advise
            changes["attack"] = [*_list_new_attacks(design, config.attack), _message_attack(attacks)]
        return Symptom(detail=f"{names}: {missing}.", changes=changes)


def _is_adaptive(config: Config, attacks: Collection[Attack]) -> bool:
    return _is_granted(config, "defenses") and _reads_defenses(attacks)


def _reads_defenses(attacks: Collection[Attack]) -> bool:
    return any("defenses" in attack.declared_facts() for attack in attacks)


def _list_new_attacks(design: EvaluationDesign, tables: Collection[AttackTable]) -> list[dict[str, Any]]:
    """Return attacks that stay in the file; none for a sweep, whose axis of attacks gets another value."""
    return [] if design.sweep else [table.model_dump(exclude_unset=True) for table in tables]


class NoPublicPrior(PitfallRule):
    """Inversions of images under a defense, none with a prior from public data."""

    name = "no-public-prior"
    title = "no attack on a defense has a prior from public images"
    reason = "Noise and rounding that stopped attacks without such a prior did not stop attacks with one."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the defenses of images that no inversion with a prior from public data is made on."""
        defended = [(config, attacks) for config, attacks in design.attacked_configs if config.defense]
        inverted = [(config, attacks) for config, attacks in defended if _invert_images(design, config, attacks)]
        if not inverted or any(_has_public_prior(attack) for _, attacks in defended for attack in attacks):
            return None
        names = ", ".join(dict.fromkeys(table.name for config, _ in inverted for table in config.defense))
        changes: dict[str, Any] = {
            "adversary": {"knowledge": {"defenses": True, "auxiliary": True}},
            "attack": [*_list_new_attacks(design, inverted[0][0].attack), {"name": "map"}],
        }
        return Symptom(detail=f"{names}: no inversion attack has a prior from public images.", changes=changes)


def _invert_images(design: EvaluationDesign, config: Config, attacks: Collection[Attack]) -> bool:
    dataset = design.dataset(config)
    if dataset is None or len(dataset.task.input_shape) != 3:
        return False
    return any(isinstance(attack, GradientInversion) for attack in attacks)


def _has_public_prior(attack: Attack) -> bool:
    """Return whether an attack claims inputs, which lie in a range, and knows public ones."""
    return attack.readable_facts() >= {"auxiliary", "value_range"}


class PrivateKnowledge(PitfallRule):
    """An attack that is handed what no server has."""

    name = "private-knowledge"
    title = "knowledge that no server has"
    reason = "With parts of the victim's data, scores are only upper bounds on leakage."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the facts that are private, granted wherever an attack reads them, and needed."""
        users: dict[str, list[str]] = {}
        for name, fact in FACTS.items():
            if fact.private:
                titles = _titles_of_users(design, name)
                # Where labels need not be granted, `GrantedLabels` says so.
                if titles and (name != "labels" or _needs(design, name)):
                    users[name] = titles
        if not users:
            return None
        parts = []
        for name, titles in users.items():
            parts.append(f"adversary.knowledge.{name} ({FACTS[name].victim_data}), for {', '.join(titles)}")
        changes: dict[str, Any] = {"adversary": {"knowledge": dict.fromkeys(users, False)}}
        spec, attacks = design.attacked_specs[0]
        if any(_needs(design, name) for name in users):
            remaining = []
            for table, attack in zip(spec.attack, attacks, strict=True):
                if not attack.required_facts & set(users) and attack.builds_on is None:
                    remaining.append(table)
            changes["attack"] = _list_new_attacks(design, remaining) or [_message_attack(attacks)]
        return Symptom(detail=f"The adversary is granted {'; '.join(parts)}.", changes=changes)


def _titles_of_users(design: EvaluationDesign, fact: str) -> list[str]:
    """Return the attacks that read a fact; none where one cell grants it and another does not."""
    titles: dict[str, None] = {}
    for spec, attacks in design.attacked_specs:
        readers = [attack.title for attack in attacks if fact in attack.readable_facts()]
        if readers and not _is_granted(spec, fact):
            return []
        titles |= dict.fromkeys(readers)
    return list(titles)


def _needs(design: EvaluationDesign, fact: str) -> bool:
    return any(fact in attack.required_facts for _, attacks in design.attacked_specs for attack in attacks)


class GrantedLabels(PitfallRule):
    """An attack that is handed the labels though it infers them where it is not."""

    name = "granted-labels"
    title = "labels granted that the attack can infer"
    reason = "Real servers have to infer labels; if this fails, reconstruction usually fails, too."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the attacks that are granted labels and could do without."""
        if not _titles_of_users(design, "labels") or _needs(design, "labels"):
            return None
        names = ", ".join(_titles_of_users(design, "labels"))
        return Symptom(
            detail=f"{names}: adversary.knowledge.labels is granted, and inferred where it is not.",
            changes={"adversary": {"knowledge": {"labels": False}}},
        )


class AuxiliaryTestData(PitfallRule):
    """An attack that learns from the examples that its floor is made of."""

    name = "test-as-auxiliary"
    title = "test data used as auxiliary data"
    reason = "The attack then learns from the data from which its floor is computed."
    facts = ("auxiliary", "property_records")

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the attacks that are granted records of the test set."""
        configs = [config for config, _ in design.attacked_configs]
        users: dict[str, None] = {}
        for fact in self.facts:
            users |= dict.fromkeys(_titles_of_users(design, fact))
        # The server's test examples are then those of clients that train nothing.
        has_test_clients = any(
            config.partition.test_fraction and config.partition.test_by == "client" for config in configs
        )
        # Where clients hold a part of the training examples, the others are drawn.
        has_spare_examples = all(config.partition.samples_per_client for config in configs)
        # Guesses are made of the first test examples, and records drawn of the others.
        has_further_tests = all(_count_test_examples(design, config) > GUESSED_EXAMPLES for config in configs)
        if not configs or not users or has_test_clients or has_spare_examples or has_further_tests:
            return None
        return Symptom(
            detail=f"{', '.join(users)}: auxiliary records are drawn from the test set, as guesses are "
            f"(of its first {GUESSED_EXAMPLES} examples).",
            changes={"partition": {"test_fraction": 0.2, "test_by": "client"}},
        )


def _count_test_examples(design: EvaluationDesign, config: Config) -> int:
    """Return the size of the data set's test part, 0 where it is not known."""
    dataset = design.dataset(config)
    return 0 if dataset is None else len(dataset.test)


class FewVictims(PitfallRule):
    """Too few victims for a verdict."""

    name = "few-victims"
    title = "too few victims for a verdict"
    reason = f"Scores of fewer than {MIN_VICTIMS} victims are too often beyond the floor by chance."

    def find(self, design: EvaluationDesign) -> Symptom | None:
        """Return the attacks whose first metric needs more victims than there are."""
        titles: dict[str, None] = {}
        most = 0
        for spec, attacks in design.attacked_specs:
            needy = [attack.title for attack in attacks if _needs_victims(attack)]
            count = _count_victims(spec)
            if needy and (count is None or count * max(len(design.seeds), 1) >= MIN_VICTIMS):
                return None
            titles |= dict.fromkeys(needy)
            most = max(most, count or 0)
        if not titles:
            return None
        victims = number_of(most, "victim")
        return Symptom(
            detail=f"{', '.join(titles)}: {victims}; a verdict by the first metric takes {MIN_VICTIMS}.",
            changes=_attack_all_clients(design.attacked_specs[0][0]),
        )


def _needs_victims(attack: Attack) -> bool:
    """Return whether the first metric of an attack's scores reaches no verdict from one victim."""
    if attack.main_metric:
        return describe_metric(attack.main_metric).evidence not in _DECIDED_BY_ONE
    return "candidates" not in attack.needs  # which are ranked


def _count_victims(spec: AttackFile) -> int | None:
    """Return the number of victims; None where it depends on the recording."""
    victims = spec.adversary.victims
    if victims != "all":
        return len(victims or [0])
    if not isinstance(spec, Config):
        return None
    return len(spec.recording.clients or range(spec.federation.clients))


def _attack_all_clients(spec: AttackFile) -> dict[str, Any]:
    changes: dict[str, Any] = {"adversary": {"victims": "all"}}
    if isinstance(spec, Config):
        clients = spec.federation.clients
        if clients < MIN_VICTIMS:
            clients = _CLIENTS
            changes["federation"] = {"clients": clients}
        if len(spec.recording.clients or range(MIN_VICTIMS)) < MIN_VICTIMS:
            changes["recording"] = {"clients": list(range(clients))}
    return changes
