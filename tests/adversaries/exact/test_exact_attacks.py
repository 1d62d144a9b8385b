"""Attacks that read inputs off a first linear layer: what they recover, what they certify, what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.exact.analytic import Analytic
from adversaries.exact.cocktail_party import CocktailParty
from adversaries.exact.consistency import find_sum_column, repair_columns, shared_ratios
from adversaries.exact.layer import FirstLayer, read_first_layer
from adversaries.exact.mixture import InputMixture
from adversaries.exact.spear import Spear
from adversaries.exact.spear_ica import SpearIca
from adversaries.exact.spear_ica_rounds import SpearIcaRounds
from fedsim.base.errors import AttackError, ConfigError
from fedsim.base.loss_term import with_loss_term
from fedsim.base.metrics import pair_examples, psnr
from fedsim.base.randomness import generator, seed_globals
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.findings import Reconstruction
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.first_layer import is_rectified
from tests.support.recordings import build_update

SGD: dict[str, Any] = {"lr": 0.05}


@cache
def read_all_digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits  # takes seconds

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(labels)


def digits(count: int, key: int = 0) -> tuple[Tensor, Tensor]:
    """Images in [0, 1] and labels."""
    images, labels = read_all_digits()
    chosen = torch.randperm(len(labels), generator=generator("digits", key))[:count]
    return images[chosen], labels[chosen]


def mlp(*middle: nn.Module, units: int = 200, bias: bool = True) -> nn.Module:
    layers = middle or (nn.ReLU(),)
    with seed_globals("mlp"):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, units, bias=bias), *layers, nn.Linear(units, 10))


def trained(
    inputs: Tensor,
    labels: Tensor,
    new: Callable[[], nn.Module],
    *,
    epochs: int = 10,
    batch: int = 5,
    options: Mapping[str, Any] = SGD,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    start: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after local training."""
    model = new().train()
    if start is not None:
        model.load_state_dict(start)
    before = {name: p.detach().clone() for name, p in model.state_dict().items()}
    steps, rng = optimizer(model.parameters(), **options), generator("batches")
    for _ in range(epochs):
        for chosen in torch.randperm(len(inputs), generator=rng).split(batch):
            steps.zero_grad()
            cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            steps.step()
    return before, {name: p.detach().clone() for name, p in model.state_dict().items()}


def known(new: Callable[[], nn.Module] = mlp, value_range: tuple[float, float] = (0.0, 1.0)) -> Knowledge:
    low, high = value_range
    return Knowledge(model=new, loss=cross_entropy, input_shape=(1, 8, 8), num_classes=10, value_range=([low], [high]))


def attacked(
    attack: Attack,
    folder: Path,
    before: Mapping[str, Tensor],
    payload: Payload,
    num_examples: int,
    new: Callable[[], nn.Module] = mlp,
    value_range: tuple[float, float] = (0.0, 1.0),
) -> Reconstruction:
    recorder = Recorder(folder)
    update = Update(round=1, client=0, before=dict(before), payload=payload, num_examples=num_examples)
    recorder.write(1, [update])
    low, high = value_range
    known = Knowledge(model=new, loss=cross_entropy, input_shape=(1, 8, 8), num_classes=10, value_range=([low], [high]))
    finding = attack.run(Target(transcript=Transcript(folder), victim=0, knowledge=known, rng=generator("attack")))
    assert isinstance(finding, Reconstruction)
    return finding


def from_training(attack: Attack, folder: Path, count: int, **how: Any) -> tuple[Reconstruction, Tensor, Tensor]:
    inputs, labels = digits(count)
    new = how.pop("new", mlp)
    before, after = trained(inputs, labels, new, **how)
    return attacked(attack, folder, before, Payload.from_dense(after, "weights"), count, new), inputs, labels


def check_exact(finding: Reconstruction, inputs: Tensor, at_least: float = 60) -> None:
    assert finding.certified is not None
    assert finding.certified.all()
    assert len(finding.data) == len(inputs)
    assert psnr(pair_examples(finding.data, inputs), inputs).min() > at_least


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        pytest.param({"epochs": 1, "batch": 10}, marks=pytest.mark.thorough),
        pytest.param({"options": {"lr": 0.05, "momentum": 0.9}}, marks=pytest.mark.thorough),
        pytest.param({"options": {"lr": 0.2}}, marks=pytest.mark.thorough),
        pytest.param({"options": {"lr": 0.05, "weight_decay": 0.01}}, marks=pytest.mark.thorough),
        pytest.param({"options": {"lr": 0.05, "weight_decay": 0.01, "momentum": 0.9}}, marks=pytest.mark.thorough),
        {"new": lambda: mlp(nn.ReLU(), nn.Linear(200, 200), nn.ReLU())},
        pytest.param({"new": lambda: mlp(nn.ReLU(), nn.Dropout(0.2)).eval()}, marks=pytest.mark.thorough),
    ],
    ids=[
        "ten epochs",
        "one step",
        "momentum",
        "large rate",
        "weight decay",
        "weight decay with momentum",
        "two hidden layers",
        "dropout",
    ],
)
def test_local_epochs_leave_every_image_exact_and_its_label_known(tmp_path: Path, how: dict[str, Any]) -> None:
    finding, inputs, labels = from_training(SpearIca(), tmp_path, 10, **how)
    check_exact(finding, inputs)
    if "dropout" not in str(how):
        assert finding.labels.sort().values.tolist() == labels.sort().values.tolist()


@pytest.mark.parametrize("kind", ["gradient", pytest.param("delta", marks=pytest.mark.thorough)])
def test_what_is_sent_instead_of_weights_is_read_as_it_is(tmp_path: Path, kind: str) -> None:
    inputs, labels = digits(12)
    model = mlp()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    cross_entropy(model(inputs), labels).backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sent = (
        Payload.from_dense(gradient, "gradient")
        if kind == "gradient"
        else Payload.from_dense({name: -0.1 * g for name, g in gradient.items()}, "delta")
    )
    check_exact(attacked(SpearIca(), tmp_path, before, sent, 12), inputs)


def test_inputs_in_other_units_come_back_in_the_unit_range(tmp_path: Path) -> None:
    inputs, labels = digits(10)
    before, after = trained((inputs - 0.3) / 0.25, labels, mlp)
    ends = (-0.3 / 0.25, 0.7 / 0.25)
    finding = attacked(SpearIca(), tmp_path, before, Payload.from_dense(after, "weights"), 10, value_range=ends)
    check_exact(finding, inputs)


def test_two_equal_examples_are_claimed_once_and_n_is_an_upper_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs, labels = digits(8)
    both = torch.cat([inputs, inputs[:1]]), torch.cat([labels, labels[:1]])
    before, after = trained(*both, mlp)
    finding = attacked(SpearIca(), tmp_path, before, Payload.from_dense(after, "weights"), 12)
    assert len(finding.data) == len(inputs)
    assert psnr(pair_examples(finding.data, inputs), inputs).min() > 60
    assert finding.certified is not None
    assert not finding.certified.any()  # they could be nearly equal
    assert "the update spans 8 inputs, N is 12" in caplog.text


def test_a_mean_of_nearly_equal_examples_is_not_certified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After one step their gradients may be proportional, so that they share a column."""

    def deep() -> nn.Module:
        with seed_globals("deep"):
            layers = nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10)
            return nn.Sequential(nn.Flatten(), *layers)

    for key in (0, 4):
        inputs, labels = digits(6, key)
        near = (inputs[:1] + 0.01 * torch.rand(1, 1, 8, 8, generator=generator("near", key))).clamp(0, 1)
        inputs, labels = torch.cat([inputs, near]), torch.cat([labels, labels[:1]])
        before, after = trained(inputs, labels, deep, epochs=1, batch=7)
        with suppress(AttackError):
            finding = attacked(SpearIca(), tmp_path / f"{key}", before, Payload.from_dense(after, "weights"), 7, deep)
            assert finding.certified is not None
            sure = finding.data[finding.certified].flatten(1)
            assert ((torch.cdist(sure, inputs.flatten(1)).square() / 64).amin(1) < 1e-6).all()
    assert "the update spans 6 inputs, N is 7" in caplog.text


def test_under_little_noise_no_certificate_is_below_60_db(tmp_path: Path) -> None:
    """Around where the error that noise makes of an image is what a certificate allows."""
    inputs, labels = digits(12)
    before, after = trained(inputs, labels, mlp)
    sure = 0
    for key, share in ((0, 1e-5), (7, 1e-4), (10, 2.8e-4)):
        rng = generator("noise", key)
        noisy = {
            name: tensor
            + share * (tensor - before[name]).square().mean().sqrt() * torch.randn(tensor.shape, generator=rng)
            for name, tensor in after.items()
        }
        with suppress(AttackError):
            finding = attacked(SpearIca(), tmp_path / f"{key}", before, Payload.from_dense(noisy, "weights"), 12)
            assert finding.certified is not None
            sure += int(finding.certified.sum())
            found = finding.data[finding.certified].flatten(1)
            assert ((torch.cdist(found, inputs.flatten(1)).square() / 64).amin(1) < 1e-6).all()
    assert 12 < sure < 36


class Noisy(nn.Module):
    """Adds noise to the inputs while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits."""
        return self.inner(inputs + 0.1 * torch.rand_like(inputs) if self.training else inputs)


@pytest.mark.parametrize(
    "new",
    [lambda: nn.Sequential(nn.Dropout(0.1), mlp()), Noisy],
    ids=["dropout", "noise"],
)
def test_what_changes_the_inputs_while_they_are_trained_on_is_refused(
    tmp_path: Path, new: Callable[[], nn.Module]
) -> None:
    with pytest.raises(AttackError, match="no linear layer that is trained and sent takes the inputs themselves"):
        from_training(SpearIca(), tmp_path, 8, new=new, epochs=1, batch=8)


@pytest.mark.parametrize("decay", [1e-4, pytest.param(1e-3, marks=pytest.mark.thorough)])
def test_weight_decay_of_the_weights_alone_is_taken_away(tmp_path: Path, decay: float) -> None:
    def apart(parameters: Any, lr: float) -> torch.optim.Optimizer:
        matrices, vectors = [], []
        for parameter in parameters:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
        return torch.optim.SGD([{"params": matrices, "weight_decay": decay}, {"params": vectors}], lr=lr)

    finding, inputs, _ = from_training(SpearIca(), tmp_path, 8, optimizer=apart)
    check_exact(finding, inputs)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda sent, after: sent | {"1.weight": after["1.weight"]}, "the bias of the first linear layer '1' did not"),
        (lambda sent, after: sent | {"3.weight": after["3.weight"]}, "the first linear layer '1' did not move"),
    ],
    ids=["bias", "layer"],
)
@pytest.mark.parametrize("attack", [SpearIca(), Spear(), Analytic(), CocktailParty()], ids=lambda a: type(a).__name__)
def test_a_layer_that_did_not_move_is_refused(
    tmp_path: Path, attack: Attack, change: Callable[..., dict[str, Tensor]], sentence: str
) -> None:
    inputs, labels = digits(4)
    before, after = trained(inputs, labels, mlp)
    with pytest.raises(AttackError, match=sentence):
        attacked(attack, tmp_path, before, Payload.from_dense(change(before, after), "weights"), 4)


def test_inputs_that_leave_the_range_are_not_certified(tmp_path: Path) -> None:
    """As where biases have a smaller learning rate than weights."""
    inputs, labels = digits(8)
    before, after = trained(inputs, labels, mlp)
    after["1.bias"] = before["1.bias"] + 0.5 * (after["1.bias"] - before["1.bias"])
    finding = attacked(SpearIca(), tmp_path, before, Payload.from_dense(after, "weights"), 8)
    assert finding.certified is not None
    assert not finding.certified.any()


def test_images_of_one_pixel_are_taken_for_rows_of_a_table(tmp_path: Path) -> None:
    inputs, labels = digits(6)
    inputs = inputs.reshape(6, 64, 1, 1)
    before, after = trained(inputs, labels, mlp)
    Recorder(tmp_path).write(1, [build_update(before, after, num_examples=6)])
    knowledge = replace(known(), input_shape=(64, 1, 1))
    finding = SpearIca().run(
        Target(transcript=Transcript(tmp_path), victim=0, knowledge=knowledge, rng=generator("attack"))
    )
    assert isinstance(finding, Reconstruction)
    check_exact(finding, inputs)


@pytest.mark.thorough
def test_the_sum_of_two_clients_gives_the_images_of_both(tmp_path: Path) -> None:
    (first, labels), (second, others) = digits(8, 1), digits(8, 2)
    before, one = trained(first, labels, mlp)
    _, two = trained(second, others, mlp)
    mean = {name: (one[name] + two[name]) / 2 for name in one}
    finding = attacked(SpearIca(), tmp_path, before, Payload.from_dense(mean, "weights"), 16)
    check_exact(finding, torch.cat([first, second]))


@pytest.mark.parametrize("attack", [Spear(), SpearIca(), Analytic()], ids=lambda attack: type(attack).__name__)
def test_one_example_is_exact_by_every_attack(tmp_path: Path, attack: Attack) -> None:
    finding, inputs, labels = from_training(attack, tmp_path, 1, batch=1)
    assert psnr(finding.data, inputs).item() > 60
    assert finding.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("count", [4, pytest.param(10, marks=pytest.mark.thorough)])
def test_spear_samples_a_batch_exactly(tmp_path: Path, count: int) -> None:
    finding, inputs, _ = from_training(Spear(), tmp_path, count, epochs=1, batch=count)
    check_exact(finding, inputs)


def test_inputs_without_any_structure_are_exact_by_the_halfspaces_of_units(tmp_path: Path) -> None:
    inputs = torch.randn(40, 1, 8, 8, generator=generator("inputs"))
    new = partial(mlp, units=400)
    before, after = trained(inputs, torch.arange(40) % 10, new, epochs=1, batch=40)
    attack = SpearIca(passes=12, draws=0)  # components tell no Gaussian numbers apart
    sent = Payload.from_dense(after, "weights")
    finding = attacked(attack, tmp_path, before, sent, 40, new, value_range=(-8.0, 8.0))
    check_exact(finding, (inputs + 8) / 16)


def test_spear_says_when_its_draws_were_too_few(tmp_path: Path) -> None:
    with pytest.raises(AttackError, match=r"1 draws gave 0 of 30 columns; raise draws, or choose 'spear-ica'"):
        from_training(Spear(draws=1), tmp_path, 30)


@pytest.mark.thorough
def test_noise_that_hides_the_columns_certifies_nothing_and_more_of_it_is_refused(tmp_path: Path) -> None:
    inputs, labels = digits(6)
    before, after = trained(inputs, labels, mlp)
    moved = torch.cat([(after[name] - before[name]).flatten() for name in after]).norm()
    per_number = moved / sum(tensor.numel() for tensor in after.values()) ** 0.5
    seen = []
    for place, share in enumerate((1e-5, 1e-3, 1.0)):
        rng = generator("noise", place)
        noisy = {n: t + share * per_number * torch.randn(t.shape, generator=rng) for n, t in after.items()}
        try:
            finding = attacked(SpearIca(), tmp_path / str(place), before, Payload.from_dense(noisy, "weights"), 6)
        except AttackError as error:
            seen.append(str(error))
            continue
        assert finding.certified is not None
        apart = torch.cdist(finding.data[finding.certified].flatten(1), inputs.flatten(1)).square() / 64
        assert (apart.amin(1) < 1e-6).all() if len(apart) else True
        seen.append("certified" if finding.certified.all() else "estimated")
        assert seen[0] == "certified"
    assert "the gap in its singular values is too small" in seen[-1]
    assert "estimated" in seen


@pytest.mark.thorough
def test_no_certificate_is_wrong_where_columns_are_hard_to_find(tmp_path: Path) -> None:
    certified = 0
    for key in (6, 8, 9, 10):
        inputs, labels = digits(14, key)
        units = 60 + 30 * (key % 4)
        before, after = trained(inputs, labels, lambda units=units: mlp(units=units), batch=7, epochs=1 + key % 3)  # type: ignore[misc]
        finding = attacked(
            SpearIca(),
            tmp_path / str(key),
            before,
            Payload.from_dense(after, "weights"),
            14,
            lambda units=units: mlp(units=units),  # type: ignore[misc]
        )
        assert finding.certified is not None
        sure = finding.data[finding.certified]
        certified += len(sure)
        apart = torch.cdist(sure.flatten(1).double(), inputs.flatten(1).double()).square() / 64
        assert (apart.amin(1) < 1e-6).all() if len(sure) else True
    assert certified > 14


def test_the_cocktail_party_separates_behind_any_activation(tmp_path: Path) -> None:
    new = lambda: mlp(nn.Tanh())  # noqa: E731
    finding, inputs, _ = from_training(CocktailParty(of="differences"), tmp_path, 4, new=new)
    assert finding.certified is None
    assert finding.data.shape == inputs.shape
    assert psnr(pair_examples(finding.data, inputs), inputs).mean() > psnr(torch.full_like(inputs, 0.5), inputs).mean()


@pytest.mark.parametrize(
    ("new", "count", "how", "sentence"),
    [
        (lambda: mlp(nn.Sigmoid()), 5, {}, "no ReLU directly follows the first linear layer '1'.* 'cocktail-party'"),
        # BatchNorm takes the bias away, so that 'cocktail-party' would be refused as well.
        (
            lambda: mlp(nn.BatchNorm1d(200), nn.ReLU()),
            5,
            {},
            "no ReLU directly follows the first linear layer '1'.* choose an attack that matches gradients",
        ),
        (lambda: mlp(bias=False), 5, {}, "the first linear layer '1' has no bias that is trained"),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10)),
            5,
            {},
            "no linear layer that is trained and sent takes the inputs themselves",
        ),
        (
            mlp,
            70,
            {"epochs": 1},
            r"N is 70, but \d+ units that moved and \d+ inputs that vary, of rank \d+, distinguish at most \d+",
        ),
        (mlp, 5, {"optimizer": torch.optim.Adam, "options": {"lr": 0.01}}, "spans more than N = 5 inputs"),
    ],
    ids=["sigmoid", "batch norm", "no bias", "convolution", "too many", "adam"],
)
def test_what_gives_nothing_away_is_refused_in_one_sentence(
    tmp_path: Path, new: Callable[[], nn.Module], count: int, how: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(AttackError, match=sentence):
        from_training(SpearIca(), tmp_path, count, new=new, **how)


@pytest.mark.parametrize(
    "attack", [Analytic(), SpearIca(), CocktailParty()], ids=["analytic", "spear-ica", "cocktail-party"]
)
def test_a_network_that_was_frozen_to_be_run_is_not_refused(tmp_path: Path, attack: Attack) -> None:
    inputs, labels = digits(1)
    before, after = trained(inputs, labels, mlp)
    frozen = lambda: mlp().requires_grad_(False)  # noqa: E731
    attack.check_facts(known(frozen))
    check_exact(attacked(SpearIca(), tmp_path, before, Payload.from_dense(after, "weights"), 1, frozen), inputs)
    with pytest.raises(AttackError, match="no linear layer that is trained and sent takes the inputs"):
        attack.check_facts(known(lambda: nn.Sequential(mlp()[:2].requires_grad_(False), *mlp()[2:])))


def test_a_relu_is_known_by_what_it_does() -> None:
    probes = torch.randn((4, 1, 8, 8), generator=generator("probes"))
    assert is_rectified(mlp(), "1", probes)
    assert not is_rectified(mlp(nn.LeakyReLU()), "1", probes)
    assert not is_rectified(mlp(nn.GELU()), "1", probes)


def test_rounds_read_together_are_exact_where_each_alone_is_not(tmp_path: Path) -> None:
    new = lambda: mlp(units=40)  # noqa: E731
    inputs, labels = digits(8)
    transcript = of_rounds(tmp_path, inputs, labels, new, rounds=4, epochs=2, batch=4)
    alone = SpearIca().run(
        Target(transcript=transcript.restrict_to([1]), victim=0, knowledge=known(new), rng=generator("attack"))
    )
    together = SpearIcaRounds().run(
        Target(transcript=transcript, victim=0, knowledge=known(new), rng=generator("attack"))
    )
    assert isinstance(alone, Reconstruction)
    assert isinstance(together, Reconstruction)
    assert alone.certified is not None
    assert not alone.certified.any()
    check_exact(together, inputs)


@pytest.mark.thorough
def test_no_certificate_is_wrong_where_one_example_fires_all_that_another_does(tmp_path: Path) -> None:
    """Then the zeros of a sum of the two are those of one, and a few units where they cancel seem to tell it."""
    for key in (1, 5):
        new = lambda: mlp(units=40)  # noqa: E731
        inputs, labels = digits(14, key)
        transcript = of_rounds(tmp_path / str(key), inputs, labels, new, rounds=8, epochs=2, batch=7)
        finding = SpearIcaRounds().run(
            Target(transcript=transcript, victim=0, knowledge=known(new), rng=generator("attack"))
        )
        assert isinstance(finding, Reconstruction)
        assert finding.certified is not None
        sure = finding.data[finding.certified].flatten(1).double()
        apart = torch.cdist(sure, inputs.flatten(1).double()).square() / 64
        assert (apart.amin(1) < 1e-6).all() if len(sure) else True


def of_rounds(
    folder: Path, inputs: Tensor, labels: Tensor, new: Callable[[], nn.Module], rounds: int, **how: Any
) -> Transcript:
    """What a client sends that is alone in its federation."""
    recorder, before = Recorder(folder), None
    for number in range(1, rounds + 1):
        start, after = trained(inputs, labels, new, start=before, **how)
        sent = Payload.from_dense(after, "weights")
        recorder.write(number, [Update(round=number, client=0, before=start, payload=sent, num_examples=len(inputs))])
        before = after
    return Transcript(folder)


@pytest.mark.parametrize("share", [1e-2, 1e-1])
def test_least_squares_with_silent_units_refine_what_noise_blurs(tmp_path: Path, share: float) -> None:
    inputs, labels = digits(6)
    before, after = trained(inputs, labels, mlp)
    size = torch.cat([(after[name] - before[name]).flatten() for name in after]).square().mean().sqrt()
    rng = generator("noise")
    noisy = Payload.from_dense(
        {n: t + share * size * torch.randn(t.shape, generator=rng) for n, t in after.items()}, "weights"
    )
    rough, fine = (
        attacked(CocktailParty(of="differences", refine=refine), tmp_path / str(refine), before, noisy, 6)
        for refine in (False, True)
    )
    errors = [psnr(pair_examples(finding.data, inputs), inputs).median() for finding in (rough, fine)]
    assert errors[1] > errors[0] + 3


def test_refinement_needs_relu(tmp_path: Path) -> None:
    with pytest.raises(AttackError, match="no ReLU directly follows"):
        from_training(CocktailParty(refine=True), tmp_path, 4, new=lambda: mlp(nn.Tanh()))


class PenalisedWeights(nn.Module):
    """Adds the squared norm of its first layer's weights to the loss."""

    adds_loss_term = True

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        penalty = self.body.get_parameter("1.weight").square().sum()
        return with_loss_term(self.body(inputs), penalty.expand(len(inputs)))


def test_a_term_of_the_weights_leaves_no_sum_of_inputs_in_their_gradient(tmp_path: Path) -> None:
    with pytest.raises(AttackError, match="or its weights are used twice"):
        from_training(Analytic(), tmp_path, 1, new=PenalisedWeights)


class BiasTwice(nn.Module):
    """Adds the bias of its first layer, times `share`, behind the ReLU, too; or gives it to its second layer."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.first, self.second, self.last = nn.Linear(64, 50), nn.Linear(50, 50), nn.Linear(50, 10)
        if not share:
            self.second.bias = self.first.bias

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.flatten(1)).relu() + self.share * self.first.bias
        return self.last(self.second(hidden).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("share", [1.0, 0.01, 0.0])
@pytest.mark.parametrize("attack", [SpearIca(), Analytic()])
def test_a_bias_that_is_used_twice_is_said_to_tell_no_scale(tmp_path: Path, attack: Attack, share: float) -> None:
    with pytest.raises(AttackError, match="uses the bias of the first linear layer 'first' elsewhere, too"):
        from_training(attack, tmp_path, 4, new=partial(BiasTwice, share))


@pytest.mark.parametrize("weight", [1.0, -0.3, 0.02])
def test_a_sum_of_two_columns_has_a_shared_ratio_with_each_and_is_parted(weight: float) -> None:
    layer, mixture, found = of_digits(10)
    assert not list(shared_ratios(mixture, torch.stack(found, 1)))
    together = found[0] + weight * found[1]
    wrong = [together / together.norm(), *found[1:]]
    ((first, second, ratio),) = shared_ratios(mixture, torch.stack(wrong, 1))
    assert (first, second) == (0, 1)
    assert ratio == pytest.approx(weight / float(together.norm()), rel=1e-2)
    assert find_sum_column(mixture, layer, mixture.scale_columns(torch.stack(wrong, 1))) == 0
    mended = torch.stack(repair_columns(mixture, layer, wrong), 1)
    assert (torch.stack(found) @ mended).abs().amax(1).min() > 1 - 1e-6


def of_digits(count: int) -> tuple[FirstLayer, InputMixture, list[Tensor]]:
    """The layer and the mixture of a client's update, and the true columns."""
    return of_examples(*digits(count))


def of_examples(
    inputs: Tensor, labels: Tensor, new: Callable[[], nn.Module] = mlp, **how: Any
) -> tuple[FirstLayer, InputMixture, list[Tensor]]:
    """As `of_digits`, for these examples."""
    count = len(inputs)
    before, after = trained(inputs, labels, new, **how)
    sent = Payload.from_dense(after, "weights")
    update = Update(round=1, client=0, before=before, payload=sent, num_examples=count)
    layer = read_first_layer(update, known(new))
    mixture = InputMixture.from_update(layer.weight, layer.bias, count, "here")
    gradients = torch.linalg.lstsq(inputs.flatten(1).T.double(), layer.weight[mixture.unit_indices].T).solution.T
    true = torch.linalg.lstsq(mixture.rows, gradients).solution
    found = [mixture.refine_column(column / column.norm()) for column in true.T]
    columns = [column for column in found if column is not None]
    assert len(columns) == count
    return layer, mixture, columns


@pytest.mark.parametrize("share", [0.7, 0.85])
def test_like_images_of_a_class_are_no_sums_of_each_other(share: float) -> None:
    """After one step of one hidden layer their gradients have a shared ratio, and mostly the same zeros."""
    inputs, labels = digits(10)
    inputs[1], labels[1] = inputs[0], labels[0]
    inputs[1, :, 3:6] = share * inputs[0, :, 3:6]
    one_step: dict[str, Any] = {"epochs": 1, "batch": 10, "options": {"lr": 0.1}}
    layer, mixture, found = of_examples(inputs, labels, partial(mlp, units=800), **one_step)
    columns = mixture.scale_columns(torch.stack(found, 1))
    zeros = mixture.find_zeros(columns)
    assert (zeros[:, 0] & zeros[:, 1]).sum() > 0.9 * zeros[:, 0].sum()
    assert (0, 1) in [pair[:2] for pair in shared_ratios(mixture, columns)]
    assert find_sum_column(mixture, layer, columns) is None
    for weight in (0.8, -0.5):
        together = found[0] + weight * found[1]
        wrong = [together / together.norm(), *found[1:]]
        assert find_sum_column(mixture, layer, mixture.scale_columns(torch.stack(wrong, 1))) is not None
        mended = torch.stack(repair_columns(mixture, layer, wrong), 1)
        assert (torch.stack(found) @ mended).abs().amax(1).min() > 1 - 1e-6


def test_the_search_for_parts_of_sums_ends_where_many_pairs_look_like_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 digits a wrong part had zeros at most units, so that each of the others looked like a sum with it."""
    layer, mixture, found = of_digits(10)
    pairs = [(first, second, 0.5) for first in range(10) for second in range(10) if first != second]
    monkeypatch.setattr("adversaries.exact.consistency._sum_pairs", lambda mixture, columns: pairs)
    monkeypatch.setattr("adversaries.exact.consistency.fit_trimmed_column", lambda mixture, silence: None)
    tries = []
    monkeypatch.setattr(InputMixture, "refine_column", lambda mixture, guess: tries.append(guess))
    assert repair_columns(mixture, layer, found) == found
    assert len(tries) <= 20


def test_a_column_that_is_a_sum_of_several_is_found_out() -> None:
    """Some vectors that are made zero at rank - 1 units have further zeros, as units that fire together repeat."""
    layer, mixture, found = of_digits(10)
    assert find_sum_column(mixture, layer, mixture.scale_columns(torch.stack(found, 1))) is None
    rng, sums = generator("guess"), 0
    for _ in range(300):
        units = torch.randperm(len(mixture.rows), generator=rng)[: mixture.rank - 1]
        column = mixture.refine_column(torch.linalg.svd(mixture.rows[units]).Vh[-1])
        if column is None or (torch.stack(found) @ column).abs().max() > 1 - 1e-6:
            continue
        sums += 1
        instead = int(torch.linalg.solve(torch.stack(found, 1), column).abs().argmax())
        wrong = [*found[:instead], column, *found[instead + 1 :]]
        assert find_sum_column(mixture, layer, mixture.scale_columns(torch.stack(wrong, 1))) is not None
        mended = torch.stack(repair_columns(mixture, layer, wrong), 1)
        assert (torch.stack(found) @ mended).abs().amax(1).min() > 1 - 1e-6
    assert sums


def test_a_sum_that_cannot_be_taken_apart_is_dropped_and_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, mixture, found = of_digits(10)
    together = found[0] + found[1]
    passes = iter([[together / together.norm(), *found[1:]], found])

    def add_columns(mixture: InputMixture, layer: FirstLayer, columns: list[Tensor], *rest: Any) -> None:
        for column in next(passes):
            mixture.add_column(columns, column)

    monkeypatch.setattr("adversaries.exact.spear_ica.add_estimated_columns", add_columns)
    monkeypatch.setattr("adversaries.exact.spear_ica.repair_columns", lambda mixture, layer, columns: columns)
    columns, _ = SpearIca(draws=0)._columns(mixture, layer, generator("search"), lambda _: None)
    assert ((torch.stack(columns) @ torch.stack(found, 1)).abs().amax(0) > 1 - 1e-6).all()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SpearIca(passes=0), "passes: expected at least 1, got 0"),
        (lambda: SpearIca(draws=-1), "draws: expected at least 0, got -1"),
        (lambda: Spear(draws=0), "draws: expected at least 1, got 0"),
        (lambda: CocktailParty(iterations=0), "iterations: expected at least 1, got 0"),
        (lambda: CocktailParty(of="edges"), "of: "),  # type: ignore[arg-type]
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], Attack], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


@pytest.mark.parametrize(("units", "inputs", "count"), [(12, 20, 8), (40, 30, 6)])
def test_the_noise_of_an_update_is_what_its_spare_directions_hold(units: int, inputs: int, count: int) -> None:
    """The tail of the spectrum holds the noise of the directions that no example takes, and of no others."""
    told = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        weight = normal(units, count) @ normal(count, inputs) + 1e-3 * normal(units, inputs)
        told.append(InputMixture.from_update(weight, normal(units), count, "here").noise)
    assert sum(told) / len(told) == pytest.approx(1e-3, rel=0.15)
