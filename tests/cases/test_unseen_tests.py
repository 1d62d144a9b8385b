"""Nothing is tested on that a client trains on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import fedsim
from fedsim.base.errors import ConfigError
from fedsim.data import Dataset
from fedsim.data.digits import Digits
from fedsim.data.partitions import Indices
from fedsim.federation.federated_data import FederatedData


@dataclass(frozen=True)
class SharedHalves:
    """Each client holds the first ten examples and ten of its own."""

    overlapping: ClassVar[bool] = True

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Indices]:
        del dataset, rng
        return [np.r_[:10, 10 * (client + 1) : 10 * (client + 2)] for client in range(clients)]


def shared_out(**settings: Any) -> FederatedData:
    return FederatedData(dataset=Digits().load(None), partition=SharedHalves(), clients=4, seed=1, **settings)


@pytest.mark.parametrize("test_by", ["sample", "client"])
def test_held_out_examples_that_others_train_on_are_refused(test_by: str) -> None:
    with pytest.raises(ConfigError, match=r"that are tested on are what others train on; set it to 0"):
        shared_out(test_fraction=0.5, test_by=test_by).indices(0)


def test_clients_may_share_what_nobody_is_tested_on() -> None:
    data = shared_out()
    assert [len(data.indices(client)[0]) for client in range(4)] == [20] * 4


def test_a_run_that_records_nothing_ends_well(tmp_path: Path) -> None:
    experiment = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 8},
        "model": {"name": "mlp", "hidden": [4]},
        "federation": {"engine": "serial", "clients": 2, "rounds": 1},
        "recording": {"rounds": []},
        "adversary": {"when": "never"},
    }
    run = fedsim.run(experiment, out=tmp_path / "run")
    assert (run.path / "report.html").is_file()
