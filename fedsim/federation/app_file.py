"""Tables of the file of a Flower app: who attacks it, and how it is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from fedsim.base.constraints import NonNegativeInt, PositiveInt
from fedsim.federation.config import AttackFile
from fedsim.federation.experiment_file import read_toml
from fedsim.federation.privacy_tables import SecureAggregationTable
from fedsim.federation.table import PluginTable, Table, check_choice
from fedsim.federation.table_validation import validate_tables
from fedsim.federation.trust import check_trust

if TYPE_CHECKING:
    from fedsim.interfaces.defense import Defense

RunConfig = dict[str, bool | int | float | str]
"""Settings of an app by key, as both of its sides find them in their context."""


class AppFederationTable(Table):
    """[federation]: how many clients an app has, and the seed of all that is drawn.

    Its number of rounds is a setting of the app, most often `run_config.num-server-rounds`.
    """

    clients: PositiveInt = Field(default=10, description="Number of clients.")
    seed: NonNegativeInt = Field(default=0, description="Seed of Python, NumPy and PyTorch, and of defenses.")


class AppFile(AttackFile):
    """File that `fedsim run --app FOLDER FILE` reads: an attack file, and how the app is run.

    Attributes:
        federation: number of clients and seed.
        run_config: settings of the app that differ from those in its pyproject.toml.
        defense: what acts on the update of each client before it is sent, in this order.
        secure_aggregation: the groups over which the server learns sums alone; None where it sees single updates.
    """

    federation: AppFederationTable = AppFederationTable()
    run_config: dict[str, Any] = Field(default={})
    defense: list[PluginTable] = Field(default=[])
    secure_aggregation: SecureAggregationTable | None = None

    @model_validator(mode="after")
    def _check_clients(self) -> AppFile:
        chosen, count = self.adversary.victims, self.federation.clients
        if isinstance(chosen, list):
            check_choice("adversary.victims", chosen, count, "clients")
        if self.app.replies != "weights" and (self.defense or self.secure_aggregation is not None):
            raise ValueError(
                f"app.replies: clients send a {self.app.replies}, and fedsim's defenses and sums read what an app "
                "sends as weights w_T; leave [[defense]] and [secure_aggregation] out, or let the app defend itself"
            )
        if self.secure_aggregation is not None:
            self.secure_aggregation.check_groups(count, recorded=None)
        return self

    @property
    def attack_file(self) -> AttackFile:
        """Return what the file says of the adversary."""
        return AttackFile.model_construct(**{name: getattr(self, name) for name in AttackFile.model_fields})


def read_app_defenses(path: Path, *, trust: bool) -> list[Defense]:
    """Build the defenses that fedsim put around the clients of an app; none where it ran no app.

    Args:
        path: of `app.toml` in the run folder.
        trust: import code that it names.
    """
    if not path.is_file():
        return []
    from fedsim.federation.build_plugins import build_defenses  # which imports PyTorch

    tables = read_toml(path)
    file = validate_tables(AppFile, {key: tables[key] for key in ("defense",) if key in tables}, str(path))
    check_trust(file, path, trust)
    return build_defenses(file.defense)


RUN_TABLES = tuple(name for name in AppFile.model_fields if name not in AttackFile.model_fields)
"""Tables that say how an app is run."""


def is_app_file(tables: Mapping[str, Any]) -> bool:
    """Return whether tables are those of an app's file: they say what no experiment can say, and nothing else."""
    if set(tables) - set(AppFile.model_fields):
        return False
    adversary = tables.get("adversary")
    knowledge = adversary.get("knowledge") if isinstance(adversary, Mapping) else None
    names_model = isinstance(knowledge, Mapping) and isinstance(knowledge.get("model"), str)
    return names_model or not {"run_config", "app", "truth"}.isdisjoint(tables)


def flatten_run_config(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables by keys with dots, as Flower does.

    >>> flatten_run_config({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= (
            flatten_run_config(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        )
    return flat
