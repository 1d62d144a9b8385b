"""A fact, and a setting of training, is declared once; tables, checks and texts follow from the declaration."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, fields

import pytest

from fedsim.base.errors import ConfigError
from fedsim.federation.adversary_tables import KnowledgeTable
from fedsim.federation.config import Config
from fedsim.federation.federation_tables import TrainingTable
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.knowledge import FACTS, MESSAGE_FACTS, Knowledge
from fedsim.training.settings import LocalTraining


def test_every_fact_that_a_threat_model_grants_has_a_key_and_a_text() -> None:
    assert set(FACTS) == {item.name for item in fields(Knowledge)} - {"models", "device", "modality"}
    granted = dict.fromkeys(MESSAGE_FACTS, True) | {name: fact.granted_by_default for name, fact in FACTS.items()}
    assert KnowledgeTable().model_dump() == granted
    assert all(fact.about and not fact.about.endswith(".") for fact in FACTS.values())


def test_a_fact_that_a_server_sends_along_is_a_setting_of_local_training() -> None:
    assert {name for name, fact in FACTS.items() if fact.setting} <= {item.name for item in fields(LocalTraining)}


@pytest.mark.parametrize("name", [name for name, fact in FACTS.items() if fact.value_type is None])
def test_a_fact_that_cannot_be_written_out_is_granted_or_withheld(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^x: adversary.knowledge.{name}: .*boolean"):
        validate_tables(Config, {"adversary": {"knowledge": {name: 3}}}, "x")


def test_the_training_table_has_the_settings_of_local_training_with_their_defaults() -> None:
    settings = {item.name: item.default for item in fields(LocalTraining) if item.default is not MISSING}
    del settings["proximal_mu"]  # FedProx's server sets it
    assert TrainingTable().model_dump() == settings
    with pytest.raises(ConfigError, match=r"^x: training.proximal_mu: unknown key"):
        validate_tables(Config, {"training": {"proximal_mu": 0.1}}, "x")


def test_an_experiment_file_is_checked_without_torch() -> None:
    code = "import sys, fedsim.federation.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
