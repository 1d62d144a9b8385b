"""The dossier says from whose view attacks were made."""

from __future__ import annotations

from typing import Any

import pytest

from fedsim.dossier.parties import list_aims, list_observers
from fedsim.interfaces import answer_findings, count_findings, findings, row_findings


@pytest.mark.parametrize(
    ("attacker", "examined"),
    [
        ("server", "The server"),
        ([3], "Another client"),
        ([3, 7], "Colluders: clients together, or clients with the server"),
        (["server", 3], "Colluders: clients together, or clients with the server"),
        (["eavesdropper", 3], "An outsider on the network"),
    ],
)
def test_a_party_counts_as_examined_where_it_attacked(attacker: Any, examined: str) -> None:
    parties = list_observers([{"attacker": attacker}], holds_sums=False)
    assert [party.who for party in parties if party.is_examined] == [examined]


def test_each_kind_of_finding_has_an_aim_that_is_named_where_nobody_pursued_it() -> None:
    modules = (answer_findings, count_findings, findings, row_findings)
    kinds = {getattr(value, "kind", None) for module in modules for value in vars(module).values()} - {None}
    assert {"texts", "example-count", "row-labels"} <= kinds
    pursued = list_aims([{"kind": kind, "attack": "mine"} for kind in kinds])
    assert [aim.aim for aim in pursued] == [aim.aim for aim in list_aims([])]
    assert all(aim.attacks for aim in pursued)
