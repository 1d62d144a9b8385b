"""Masks: each plug-in scores what it claims of images and masks beside a floor, or refuses in a sentence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedsim
from fedsim.audit.audit import make_audit
from fedsim.audit.evaluation.mask_scores import PaintedMasks, mask_iou, score_masks
from fedsim.audit.evaluation.truth import Truth, write_truth
from fedsim.audit.stated_model import check_outputs
from fedsim.base.errors import ConfigError, DataError, FedsimError
from fedsim.base.task import Task, goal_of, mask_loss
from fedsim.data.arrays import ArrayFile
from fedsim.data.checks import check_dataset
from fedsim.data.shapes import Shapes
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.interfaces.knowledge import Knowledge
from fedsim.interfaces.modality import PublicExamples
from fedsim.plugins import registry
from fedsim.report.page import write_report
from tests.support.attacked_runs import attack_clients, read_values
from tests.support.experiments import make_attack_file, make_tiny_config, run_serial

TABLES: dict[str, Any] = {
    "data": {"name": "shapes", "side": 8, "clients": 3, "examples_per_client": 20},
    "partition": {"name": "natural", "samples_per_client": 4},
    "model": {"name": "u-net", "channels": [4, 6], "activation": "sigmoid"},
    "training": {"batch_size": 4},
    "federation": {"clients": 3},
}
MADE = {
    *("fedmia", "inverting-gradients", "linkability", "membership-cosine", "membership-difference"),
    *("membership-combined", "membership-loss", "membership-white-box", "pixel-shares", "sia", "sme"),
}
"""Attacks that masks suit; of the others, exact ones need a first layer that is linear, and the rest classes."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    """Three clients with four images each, one step in each of two rounds."""
    return run_serial(make_tiny_config(**TABLES), tmp_path_factory.mktemp("masks") / "run")


@pytest.mark.parametrize("name", sorted(registry.registered_names("attacks")))
def test_an_attack_is_scored_beside_a_floor_or_refuses(run: OpenRun, name: str) -> None:
    audit, failures = attack_clients(run, name)
    if name not in MADE:
        assert failures
        for failure in failures:
            refusals = ("attack on", "takes one class or one number", "linear", "fully connected")
            assert any(refusal in failure for refusal in refusals), failure
        return
    assert failures == []
    assert audit is not None
    audit.score(failures)
    rows = read_values(run, name)
    scored = {row["metric"] for row in rows}
    assert scored
    assert {row["metric"] for row in rows if not math.isfinite(float(row["floor"] or "nan"))} == set()
    if "psnr" in scored:  # it claims images, and so their masks
        assert "mask_iou" in scored


def test_inversion_finds_an_image_whose_mask_is_granted(tmp_path: Path) -> None:
    tables = TABLES | {"partition": {"name": "natural", "samples_per_client": 1}, "training": {"batch_size": 1}}
    tables["model"] = {"name": "u-net"}
    run = run_serial(make_tiny_config(**tables), tmp_path / "run")
    attack = {"name": "inverting-gradients", "iterations": 200, "step_size": 0.1}
    audit = make_audit(run, make_attack_file(attack, victims=[0], rounds=[1], knowledge={"labels": True}))
    assert audit.run() == []
    audit.score()
    values = {row["metric"]: (float(row["value"]), float(row["floor"])) for row in read_values(run, attack["name"])}
    assert values["psnr"][0] > values["psnr"][1] + 5, values
    assert "mask_iou" not in values, "masks that were granted are no finding"


def test_shares_of_pixels_are_read_from_the_bias(run: OpenRun) -> None:
    audit = make_audit(run, make_attack_file("pixel-shares", victims=[2], knowledge={"auxiliary": True}))
    assert audit.run() == []
    audit.score()
    distances = [row for row in read_values(run, "pixel-shares") if row["metric"] == "label_distance"]
    values = {row["victim"]: (float(row["value"]), float(row["floor"])) for row in distances}
    assert values["2"][0] < 0.5 * values["2"][1], values


def test_masks_that_are_granted_are_no_leak_and_can_be_painted() -> None:
    dataset = Shapes(side=8, clients=2, examples_per_client=12).load(None)
    public = PublicExamples(data=dataset.test.inputs(), labels=dataset.test.labels)
    masks, images = dataset.train.labels, dataset.train.inputs()
    painted = PaintedMasks(masks, public).paint(len(masks))
    mean = public.data.mean(0).expand_as(images)
    assert float((painted - images).square().mean()) < 0.5 * float((mean - images).square().mean())
    assert PaintedMasks(masks[:1], public).paint(3).shape == (3, 1, 8, 8)


def test_masks_are_compared_class_by_class() -> None:
    masks = torch.tensor([[[0, 0], [1, 1]], [[2, 2], [2, 2]]])
    assert mask_iou(masks.flip(0), masks) == 1  # in any order
    assert mask_iou(masks[:1], masks) == 0.5  # one without a claim counts nothing
    assert mask_iou(torch.zeros(1, 2, 2).long(), masks[:1]) == 0.25  # half of a class, and nothing of another


def test_the_report_and_the_data_page_speak_of_pixels(run: OpenRun) -> None:
    audit = make_audit(run, make_attack_file({"name": "inverting-gradients", "iterations": 2}, victims=[0], rounds=[1]))
    audit.run()
    audit.score()
    write_report(run)
    page = (run.path / "report.html").read_text()
    assert "masks of 4 classes of pixels" in page
    assert "mask IoU" in page


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({"model": {"name": "mlp"}}, r"expected \(2, 4, 8, 8\) for masks of 4 classes"),
        ({"data": {"name": "digits"}, "partition": {"name": "iid"}}, "u-net takes masks of images, got 10 classes"),
        ({"defense": [{"name": "augmentation", "flip": 0.5}]}, "leave their masks as they are"),
        ({"defense": [{"name": "mixup"}]}, "what is learned is masks"),
        ({"training": {"label_smoothing": 0.1}}, "spreads labels over classes"),
        ({"partition": {"name": "dirichlet", "alpha": 0.5}}, "is masks of 4 classes of pixels"),
    ],
)
def test_what_does_not_go_with_masks_is_refused(tables: dict[str, Any], complaint: str) -> None:
    def check_all() -> None:
        experiment = Experiment(make_tiny_config(**(TABLES | tables)))
        experiment.data.indices(0)
        experiment.check()

    with pytest.raises(FedsimError, match=complaint):
        check_all()


def test_bad_masks_are_refused(tmp_path: Path) -> None:
    dataset = Shapes(side=8, clients=1, examples_per_client=4).load(None)
    wrong = fedsim.Examples(raw=dataset.train.raw, labels=dataset.train.labels + 4, scale=1.0)
    with pytest.raises(DataError, match=r"has the label 4 at example 0.* mask_classes"):
        check_dataset(fedsim.Dataset(**{**vars(dataset), "train": wrong}), "mine")
    with pytest.raises(ConfigError, match="masks are of images"):
        Task((12,), 0, mask_classes=2)
    files = write_truth(tmp_path, lambda client: (dataset.train.inputs(), dataset.train.labels), [0])
    truth = Truth.load(Path(files["0"]))
    assert torch.equal(truth.labels, dataset.train.labels)


def test_pixels_that_are_to_be_ignored_are_no_class(tmp_path: Path) -> None:
    images, masks = np.random.default_rng(1).random((6, 1, 4, 4)), np.arange(96).reshape(6, 4, 4) % 3
    masks[:, 0] = 255
    np.savez(tmp_path / "mine.npz", x=images, y=masks)
    with pytest.raises(DataError, match=r"255 may mark pixels that count for nothing.* with 3 in place of 255"):
        ArrayFile(path=str(tmp_path / "mine.npz")).load(None)
    with pytest.raises(DataError, match="the masks to score by: it has pixels of class 255"):
        score_masks(torch.zeros(6, 4, 4).long(), torch.from_numpy(masks), None, torch.Generator())
    masks[:, 0] = 0
    np.savez(tmp_path / "mine.npz", x=images[:, :, :1], y=masks[:, :1])  # one row of pixels an image
    assert ArrayFile(path=str(tmp_path / "mine.npz")).load(None).task.target_shape == (1, 4)


def test_a_loss_of_classes_on_logits_of_pixels_is_refused() -> None:
    network = torch.nn.Conv2d(1, 3, 1)
    facts = {"model": lambda: network, "input_shape": (1, 4, 4), "value_range": ([0.0], [1.0])}
    with pytest.raises(ConfigError, match='name loss = "segmentation"'):
        check_outputs(network, Knowledge(**facts, loss=torch.nn.functional.cross_entropy))
    check_outputs(network, Knowledge(**facts, loss=mask_loss))
    assert goal_of(mask_loss) == goal_of(lambda outputs, masks: mask_loss(outputs, masks)) == "masks"


def test_a_wild_claimed_class_of_pixels_lowers_no_floor() -> None:
    rng = torch.Generator().manual_seed(0)
    true, claimed = torch.randint(3, (4, 4, 4), generator=rng), torch.zeros(4, 4, 4, dtype=torch.long)
    wild = claimed.clone()
    wild[0, 0, 0] = 1 << 23  # guesses of as many classes would take for ever
    floors = [score_masks(masks, true, None, torch.Generator().manual_seed(1)).floor for masks in (claimed, wild)]
    assert floors[0] == floors[1]
