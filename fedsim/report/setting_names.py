"""Names of the settings of a sweep, by what distinguishes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedsim.report.sweep_groups import Labels


@dataclass(frozen=True)
class SettingNames:
    """Names of settings: the labels of the axes that vary, with the name of the axis where a label alone is unclear.

    >>> names = SettingNames.from_labels(["algorithm", "model.batch_norm"], [("fedper", "true"), ("fedrep", "false")])
    >>> names(("fedper", "true"))
    'fedper, batch_norm true'
    """

    axes: Sequence[str]
    varying: Sequence[bool]

    @classmethod
    def from_labels(cls, axes: Sequence[str], settings: Iterable[Labels]) -> SettingNames:
        """Return the names of the settings with these labels."""
        distinct = set(settings)
        return cls(axes, [len({labels[axis] for labels in distinct}) > 1 for axis in range(len(axes))])

    def __call__(self, labels: Labels, without: int = -1) -> str:
        """Return the name of a setting; `without` is an axis that it leaves out."""
        words = []
        for number, (axis, varies, label) in enumerate(zip(self.axes, self.varying, labels, strict=True)):
            if varies and number != without:
                tells_nothing_alone = is_number(label) or label in ("true", "false")
                words.append(f"{axis.rpartition('.')[2]} {label}" if tells_nothing_alone else label)
        return ", ".join(words)


def is_number(label: str) -> bool:
    """Return whether a label is a finite number."""
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False
