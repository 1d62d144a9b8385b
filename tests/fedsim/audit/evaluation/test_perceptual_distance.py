"""LPIPS by the authors' package, over weights that lie in the data folder."""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedsim.audit.audit import Audit
from fedsim.audit.evaluation import perceptual_distance
from fedsim.audit.evaluation.perceptual_distance import (
    PerceptualNetwork,
    check_backbone,
    find_backbone,
    lpips_distances,
)
from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import DataError
from fedsim.base.randomness import generator
from fedsim.federation.data_folder import find_weights_folder
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.interfaces.findings import Reconstruction
from tests.support.experiments import make_tiny_config
from tests.support.tensors import draw_uniform


def weights_folder() -> Path | None:
    """Network weights that lie in the data folder; there is no other way to get them offline."""
    folder = find_weights_folder()
    return folder if folder and (folder / "squeezenet1_1-imagenet1k.pth").is_file() else None


needs_weights = pytest.mark.skipif(
    weights_folder() is None, reason="no squeezenet1_1-imagenet1k.pth under $FEDSIM_DATA/weights"
)


def test_lpips_says_why_it_was_not_computed(tmp_path: Path) -> None:
    small, large, five = draw_uniform(1, 1, 15, 28), draw_uniform(1, 1, 28, 28), draw_uniform(1, 5, 28, 28)
    assert "15 x 28 are too small" in str(lpips_distances(small, small, tmp_path))
    assert "5 channels" in str(lpips_distances(five, five, tmp_path))
    assert f"no network weights at {tmp_path}" in str(lpips_distances(large, large, tmp_path))
    assert "$FEDSIM_DATA/weights" in str(lpips_distances(large, large, None))


def test_a_score_names_the_network_that_measured_it(tmp_path: Path) -> None:
    truth = Truth(data=draw_uniform(2, 1, 32, 32), labels=torch.tensor([0, 1]))
    claim = Reconstruction(data=draw_uniform(2, 1, 32, 32), labels=truth.labels)

    def instruments(weights: Path | None) -> dict[str, str]:
        scores = score_examples(claim, truth, public=None, rng=generator(0), weights=weights)
        return {score.metric: score.instrument for score in scores if score.instrument}

    assert instruments(None) == {}
    for name, backbone in (("squeezenet1_1-a.pth", "squeeze"), ("vgg16-a.pth", "vgg"), ("alexnet-a.pth", "alex")):
        (tmp_path / name).touch()
        assert instruments(tmp_path) == {"lpips": backbone}


@needs_weights
@pytest.mark.parametrize("content", [b"", b"no weights", "cut", "other"])
def test_damaged_weights_are_noticed_before_anything_is_attacked(
    content: bytes | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights" / "squeezenet1_1-imagenet1k.pth"
    path.parent.mkdir()
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save({"features.0.weight": torch.full((64, 3, 3, 3), torch.nan)}, path)
        if content == "cut":
            path.write_bytes(path.read_bytes()[:-500])
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    config = make_tiny_config(attack=[{"name": "sme"}], adversary={"when": "at-end"})
    audit = Audit(folder=OpenRun(tmp_path), spec=config, experiment=Experiment(config), base_folder=tmp_path)
    audit.check()  # no LPIPS is computed of digits
    small = replace(perceptual_distance.BACKBONES[2], smallest=8)
    monkeypatch.setattr(perceptual_distance, "BACKBONES", [small])
    with pytest.raises(DataError, match="is not a readable file of weights") as caught:
        audit.check()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["squeeze", "alex", pytest.param("vgg", marks=pytest.mark.slow)])
def test_each_network_has_the_bits_of_the_authors_package(name: str) -> None:
    lpips = pytest.importorskip("lpips")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package passes arguments that torchvision is to drop
        authors = lpips.LPIPS(net=name, pnet_rand=True, verbose=False)
    network = PerceptualNetwork(name)
    layers = {f"features.{key.partition('.')[2]}": values for key, values in authors.net.state_dict().items()}
    network.load_state_dict(layers)
    images, others = (2 * draw_uniform(2, 3, 40, 33, seed=seed) - 1 for seed in (0, 1))
    expected = authors(images, others)
    assert expected.min() > 0
    first, second = torch.arange(4).split(2)
    assert torch.equal(network(torch.cat([images, others]), first, second), expected)


@needs_weights
@pytest.mark.parametrize("channels", [1, 3])
def test_lpips_is_zero_for_equals_and_rises_with_noise(channels: int) -> None:
    true = draw_uniform(2, channels, 32, 32)
    noise = torch.randn(true.shape, generator=torch.Generator().manual_seed(3))
    values = []
    for strength in (0.0, 0.05, 0.2, 0.5):
        value = lpips_distances((true + strength * noise).clamp(0, 1), true, weights_folder())
        assert isinstance(value, Tensor)
        assert value.shape == (2,)
        values.append(value.mean().item())
    assert values[0] == pytest.approx(0, abs=1e-6)
    assert values == sorted(values)
    assert values[-1] > 0.01


@needs_weights
def test_lpips_is_what_its_definition_says_of_the_heads_in_torchmetrics() -> None:
    """With the published weights under the heads that come with the package, on RGB in [-1, 1]."""
    from torchvision.models import squeezenet1_1

    folder = weights_folder()
    assert folder is not None
    claimed, true = draw_uniform(3, 3, 24, 24), draw_uniform(3, 3, 24, 24, seed=4)
    features = squeezenet1_1(weights=None)
    features.load_state_dict(torch.load(folder / "squeezenet1_1-imagenet1k.pth", weights_only=True))
    package = find_spec("torchmetrics")
    assert package is not None
    assert package.origin is not None
    heads = torch.load(
        Path(package.origin).parent / "functional/image/lpips_models/squeeze.pth",
        map_location="cpu",
        weights_only=True,
    )
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    taps, total = (1, 4, 7, 9, 10, 11, 12), torch.zeros(3)
    with torch.no_grad():
        x, y = (((2 * z - 1) - shift[:, None, None]) / scale[:, None, None] for z in (claimed, true))
        for index, layer in enumerate(features.features.eval()):
            x, y = layer(x), layer(y)
            if index in taps:
                unit = [z / (z.square().sum(1, keepdim=True).sqrt() + 1e-8) for z in (x, y)]
                weight = heads[f"lin{taps.index(index)}.model.1.weight"]
                total += ((unit[0] - unit[1]).square() * weight).sum(1).mean((1, 2))
    value = lpips_distances(claimed, true, folder)
    assert isinstance(value, Tensor)
    torch.testing.assert_close(value, total, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_alexnet_is_taken_where_its_weights_are_there(tmp_path: Path) -> None:
    """The package's own network, given the same weights by hand, has the same distances."""
    from lpips import LPIPS
    from torchvision.models import alexnet

    torch.manual_seed(0)
    network = alexnet(weights=None)
    layers = {name: tensor for name, tensor in network.state_dict().items() if name.startswith("features")}
    torch.save(layers, tmp_path / "alexnet-owt-7be5be79.pth")
    torch.save({}, tmp_path / "squeezenet1_1-imagenet1k.pth")
    found = find_backbone(tmp_path)
    assert found is not None
    assert found[0].name == "alex"
    claimed, true = draw_uniform(2, 3, 40, 40), draw_uniform(2, 3, 40, 40, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = LPIPS(net="alex", pnet_rand=True, verbose=False).eval()
    convolutions = [layer for layer in reference.net.modules() if isinstance(layer, torch.nn.Conv2d)]
    originals = [layer for layer in network.features if isinstance(layer, torch.nn.Conv2d)]
    for layer, original in zip(convolutions, originals, strict=True):
        layer.load_state_dict(original.state_dict())
    with torch.no_grad():
        expected = reference(claimed * 2 - 1, true * 2 - 1).flatten()
    distances = lpips_distances(claimed, true, tmp_path)
    assert isinstance(distances, Tensor)
    torch.testing.assert_close(distances, expected)
    assert "30 x 40 are too small" in str(
        lpips_distances(draw_uniform(1, 3, 30, 40), draw_uniform(1, 3, 30, 40), tmp_path)
    )


def test_weights_of_another_network_are_named(tmp_path: Path) -> None:
    torch.save({"features.0.weight": torch.zeros(64, 3, 3, 3)}, tmp_path / "vgg16-397923af.pth")
    with pytest.raises(DataError, match=r"vgg16-397923af.pth: .*it holds another network than vgg"):
        check_backbone(tmp_path)
    with pytest.raises(DataError, match="holds another network than vgg"):
        check_backbone(tmp_path, (3, 16, 20))
    for shape in ((1, 8, 8), (13,)):  # no LPIPS is computed of these
        check_backbone(tmp_path, shape)
