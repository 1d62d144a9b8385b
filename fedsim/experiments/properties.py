"""A property of examples, such as the sex of a person, and auxiliary records that say whether they have it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedsim.datasets import Column, Dataset, Examples
from fedsim.errors import ConfigError, DataError, did_you_mean
from fedsim.experiments.auxiliary import drawn
from fedsim.experiments.federated_data import FederatedData
from fedsim.knowledge import PropertyRecords

GROUP = "group"
_KEY = "property_records"
_WHERE = f"adversary.knowledge.{_KEY}"


@dataclass(frozen=True, kw_only=True)
class Property:
    """A category of a column of a table, as `sex=Female`, or a natural group, as `group=Ann`.

    A column that was made the group of a table is no feature, so the model never sees it.

    Attributes:
        column: the column; None where it is the group.
        place: of the category among those of the column, or of the group among the names of groups.
    """

    column: Column | None
    place: int

    @classmethod
    def named(cls, dataset: Dataset, name: str) -> Property:
        """The property called `name`.

        Raises:
            ConfigError: the data have no such column, category or group.
        """
        own, sign, value = (part.strip() for part in name.partition("="))
        if not sign:
            raise ConfigError(f"{_WHERE}: expected column=category, as sex=Female, or group=name, got '{name}'")
        columns = {column.name: column for column in dataset.columns if column.categories}
        values = {column.name: column.categories for column in columns.values()}
        if dataset.group_names:
            values = {GROUP: dataset.group_names} | values
        if not values:
            raise ConfigError(
                f"{_WHERE}: '{dataset.name}' has neither columns of categories nor groups with names, so that no "
                "property of its examples is known; choose a table, or data with groups"
            )
        if any(column.name == own for column in dataset.columns) and own not in columns:
            raise ConfigError(
                f"{_WHERE}: '{own}' is a column of numbers, and a property is one of several categories; known: "
                f"{', '.join(sorted(values))}"
            )
        if own not in values:
            raise ConfigError(f"{_WHERE}: '{dataset.name}' has no categories of '{own}', {did_you_mean(own, values)}")
        if value not in values[own]:
            raise ConfigError(f"{_WHERE}: '{own}' is never '{value}', {did_you_mean(value, values[own])}")
        return cls(column=columns.get(own), place=values[own].index(value))

    def of(self, examples: Examples, index: Tensor) -> Tensor:
        """`example`, whether it has the property, of those at `index`.

        Raises:
            DataError: nobody says of what groups these are.
        """
        if self.column is not None:
            return self.column.values(examples.inputs(index)) == self.place
        if examples.groups is None:
            raise DataError(f"{_WHERE}: of the examples that nobody trains on the groups are not known; name a column")
        return examples.groups[index] == self.place


def property_records(data: FederatedData, name: str, most: int) -> PropertyRecords:
    """At most `most` of the examples that nobody trains on, which say whether they have the property called `name`.

    Raises:
        ConfigError: there is no such property.
        DataError: clients train on all there is, or all of these records have the property, or none has.
    """
    kind = Property.named(data.dataset, name)
    examples, chosen = drawn(data, most, _KEY)
    has = kind.of(examples, chosen)
    if has.all() or not has.any():
        raise DataError(
            f"{_WHERE}: {'each' if has.all() else 'none'} of the {len(has)} auxiliary records has {name}, and an "
            "attack learns from records with it and records without it; raise adversary.auxiliary, or name another"
        )
    return PropertyRecords(inputs=data.to_model(examples.inputs(chosen)), labels=examples.labels[chosen], has=has)
