"""Properties of examples, such as the sex of a person, and auxiliary records labelled by them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedsim.base.errors import ConfigError, DataError, did_you_mean
from fedsim.data import Column, Dataset, Examples
from fedsim.federation.auxiliary import draw_auxiliary
from fedsim.federation.federated_data import FederatedData
from fedsim.interfaces.knowledge import PropertyRecords

GROUP = "group"
_KEY = "property_records"
_SETTING = f"adversary.knowledge.{_KEY}"


@dataclass(frozen=True, kw_only=True)
class Property:
    """Category of a column of a table, as `sex=Female`, or a natural group, as `group=Ann`.

    A column that defines the groups of a table is no feature, so the model never sees it.

    Attributes:
        column: the column; None for a group.
        index: that of the category in those of the column, or of the group in the names of groups.
    """

    column: Column | None
    index: int

    @classmethod
    def from_name(cls, dataset: Dataset, name: str) -> Property:
        """Parse the property called `name`."""
        column_name, equals, value = (part.strip() for part in name.partition("="))
        if not equals:
            raise ConfigError(f"{_SETTING}: expected column=category, as sex=Female, or group=name, got '{name}'")
        columns = {column.name: column for column in dataset.columns if column.categories}
        values = {column.name: column.categories for column in columns.values()}
        if dataset.group_names:
            values = {GROUP: dataset.group_names} | values
        if not values:
            raise ConfigError(
                f"{_SETTING}: '{dataset.name}' has neither columns of categories nor groups with "
                "names, so that no property of its examples is known; choose a table, or data with "
                "groups"
            )
        if any(column.name == column_name for column in dataset.columns) and column_name not in columns:
            raise ConfigError(
                f"{_SETTING}: '{column_name}' is a column of numbers, and a property is one of "
                f"several categories; known: {', '.join(sorted(values))}"
            )
        if column_name not in values:
            raise ConfigError(
                f"{_SETTING}: '{dataset.name}' has no categories of '{column_name}', "
                f"{did_you_mean(column_name, values)}"
            )
        categories = values[column_name]
        if value not in categories:
            raise ConfigError(f"{_SETTING}: '{column_name}' is never '{value}', {did_you_mean(value, categories)}")
        return cls(column=columns.get(column_name), index=categories.index(value))

    def values_of(self, examples: Examples, index: Tensor) -> Tensor:
        """Return for each example at `index` whether it has the property, `example`."""
        if self.column is not None:
            return self.column.values(examples.inputs(index)) == self.index
        if examples.groups is None:
            raise DataError(
                f"{_SETTING}: the groups of the examples that no client trains on are unknown; name a column"
            )
        return examples.groups[index] == self.index


def property_records(data: FederatedData, name: str, most: int) -> PropertyRecords:
    """Draw at most `most` of the examples that no client trains on, labelled by the property `name`."""
    prop = Property.from_name(data.dataset, name)
    examples, chosen = draw_auxiliary(data, most, _KEY)
    has = prop.values_of(examples, chosen)
    if has.all() or not has.any():
        raise DataError(
            f"{_SETTING}: {'each' if has.all() else 'none'} of the {len(has)} auxiliary records "
            f"has {name}, and an attack learns from records with it and records without it; raise "
            "adversary.auxiliary, or name another"
        )
    return PropertyRecords(inputs=data.to_model(examples.inputs(chosen)), labels=examples.labels[chosen], has=has)
