"""What is left of a sum without colluders is, to the rounding of floats, the sum that the others make alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedsim.federation.engines.arrays import read_state
from fedsim.federation.open_run import OpenRun
from fedsim.federation.privacy_tables import SecureAggregationTable
from fedsim.recording.adversary_role import AdversaryRole
from fedsim.recording.collusion import CollusionTranscript
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from strategies.colluder_recorder import ColluderRecorder
from strategies.secure_sum import SecureSum
from tests.strategies.test_noisy_sums import BEFORE, SIZE, mean_of, noisy_sum, sum_updates

pytestmark = pytest.mark.usefixtures("server_task")
COUNTS = [40, 7, 23, 31, 12]
COLLUDERS = (1, 3)


def draw_updates() -> list[Tensor | None]:
    rng = torch.Generator().manual_seed(1)
    return [0.1 * torch.randn(SIZE, generator=rng) for _ in COUNTS]


def record_sum(protocol: SecureSum, folder: Path) -> None:
    """Record the sum of all, and apart from it what colluders add."""
    kept = ColluderRecorder(frozenset(COLLUDERS), Recorder(folder / "colluders"), OpenRun(folder))
    [reply] = sum_updates(replace(protocol, colluders=kept), draw_updates(), COUNTS)
    (record,) = reply.content.array_records.values()
    payload = Payload.from_arrays(read_state(record), BEFORE)
    update = Update(
        round=1, client=0, before=BEFORE, payload=payload, num_examples=sum(COUNTS), members=tuple(range(len(COUNTS)))
    )
    Recorder(folder / "transcript").write(1, [update])


@pytest.mark.parametrize("noise", [None, 0.5], ids=["weighted by N", "with shares of noise"])
def test_the_rest_is_the_sum_of_the_others(noise: float | None, tmp_path: Path) -> None:
    protocol = noisy_sum(noise or 1.0)
    if noise is None:
        protocol = SecureSum(table=SecureAggregationTable(threshold=0.1), largest=40, seed=7)
    record_sum(protocol, tmp_path)
    others = [None if client in COLLUDERS else update for client, update in enumerate(draw_updates())]
    expected = mean_of(sum_updates(protocol, others, COUNTS))
    recording, own = Transcript(tmp_path), Transcript(tmp_path / "colluders")
    role = AdversaryRole("server", COLLUDERS)
    seen = CollusionTranscript(recording, own, role, is_unweighted=noise is not None)
    update = seen.update(1, 0)
    assert update.members == (0, 2, 4)
    assert update.num_examples == 40 + 23 + 12
    rest = -update.pseudo_gradient["weight"]
    assert torch.allclose(rest, torch.from_numpy(expected), atol=1e-6)
    # Those of others are not taken for it, and the noise of colluders is gone with them.
    assert not torch.allclose(rest, -recording.update(1, 0).pseudo_gradient["weight"], atol=1e-3)
    one_less = CollusionTranscript(recording, own, AdversaryRole("server", (1,)), is_unweighted=noise is not None)
    assert one_less.header(1).replies[0].members == (0, 2, 3, 4)
