"""The dossier says from whose view attacks were made."""

from __future__ import annotations

from typing import Any

import pytest

from fedsim.dossier.parties import list_observers


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
