"""Networks: as large as published, equal to independent ones, twice differentiable, refused where they do not fit."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.plugins import registry
from fedsim.training.model_state import copy_state
from fedsim.training.models import ModelPlugin
from fedsim.training.models.alexnet import AlexNet
from fedsim.training.models.convnet import ConvNet
from fedsim.training.models.lenet import LeNet, TgiasLeNet
from fedsim.training.models.linear import Linear
from fedsim.training.models.mlp import Mlp
from fedsim.training.models.resnet import ResNet8, ResNet18
from fedsim.training.models.shufflenet import ShuffleNetV2
from fedsim.training.models.sme import SmeCnn
from fedsim.training.models.text_cnn import TextCnn
from fedsim.training.models.torchvision import TorchVision
from fedsim.training.models.transformer import LoraLinear, TransformerDecoder, TransformerEncoder
from fedsim.training.models.vgg import Vgg9
from fedsim.training.models.vit import Vit, VitApril
from tests.support.scripts import load_script

FEMNIST, MNIST = Task((1, 28, 28), 62), Task((1, 28, 28), 10)
CIFAR10, CIFAR100 = Task((3, 32, 32), 10), Task((3, 32, 32), 100)
IMAGENET, TEXTS, TABLE = Task((3, 224, 224), 1000), Task((20,), 8, vocabulary=1000), Task((12,), 7)
PARTS = ("weight", "bias")

HE8 = ResNet8(channels=(16, 32, 64), pool="global", hidden=0)

ALL: list[tuple[ModelPlugin, Task]] = [
    (Linear(), MNIST),
    (Linear(bias=False), Task((12,), 0)),
    (Mlp(), MNIST),
    (Mlp(hidden=(32, 32, 32), batch_norm=True), TABLE),
    (Mlp(hidden=(50, 50), output_relu=True), FEMNIST),
    (SmeCnn(), FEMNIST),
    (LeNet(), FEMNIST),
    (LeNet(activation="relu"), FEMNIST),
    (LeNet(released=True), FEMNIST),
    (LeNet(layout="dlg"), CIFAR10),
    (TgiasLeNet(), MNIST),
    (AlexNet(), CIFAR10),
    (AlexNet(batch_norm=False, hidden=()), CIFAR10),
    (Vgg9(), CIFAR10),
    (Vgg9(batch_norm=True), CIFAR10),
    (ResNet8(), FEMNIST),
    (HE8, CIFAR10),
    (ResNet18(), CIFAR100),
    (ResNet18(preact=True), CIFAR100),
    (ConvNet(), CIFAR100),
    (ShuffleNetV2(width=0.5), Task((3, 64, 64), 10)),
    (VitApril(), FEMNIST),
    (VitApril(patch=4), FEMNIST),
    (Vit(dim=32), CIFAR10),
    (TextCnn(), TEXTS),
    (TextCnn(kernels=(3,)), TEXTS),
    (TransformerEncoder(dim=32), TEXTS),
    (TransformerDecoder(dim=32), TEXTS),
    (TransformerDecoder(dim=32, lora_rank=4), TEXTS),
    (TorchVision(), CIFAR10),
]
LARGE = (AlexNet, ResNet18, ConvNet, ShuffleNetV2, TorchVision, Vgg9)
EVERY = pytest.mark.parametrize(
    ("plugin", "task"),
    [
        pytest.param(
            *case, id=f"{case[0]}-{case[1].input_shape}", marks=[pytest.mark.thorough] * isinstance(case[0], LARGE)
        )
        for case in ALL
    ],
)


def built(plugin: ModelPlugin, task: Task, seed: int = 0) -> nn.Module:
    with seed_globals("test-models", seed):
        return plugin.build(task)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def on_meta(plugin: ModelPlugin, task: Task) -> nn.Module:
    with torch.device("meta"):
        return plugin.build(task)


def inputs_for(model: nn.Module, task: Task, batch: int = 2) -> Tensor:
    """Images or rows, or embeddings of random tokens; they ask for a gradient."""
    rng = generator("inputs")
    if task.vocabulary:
        tokens = torch.randint(task.vocabulary, (batch, *task.input_shape), generator=rng)
        return model.embedding(tokens).detach().requires_grad_()  # type: ignore[operator, no-any-return]
    dtype = next(model.parameters()).dtype
    return torch.rand((batch, *task.input_shape), generator=rng, dtype=dtype).requires_grad_()


def matching(model: nn.Module, task: Task, inputs: Tensor) -> Tensor:
    """What an attack minimises: here the squared norm of the parameters' gradient."""
    targets = torch.arange(len(inputs)) if task.num_classes else torch.ones(len(inputs), dtype=inputs.dtype)
    loss = task.loss(model(inputs), targets)
    weights = [p for name, p in model.named_parameters() if not (task.vocabulary and name == "embedding.weight")]
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    return torch.stack([g.square().sum() for g in gradients]).sum()


# Sizes.


@pytest.mark.parametrize(
    ("plugin", "task", "published"),
    [
        (SmeCnn(), FEMNIST, 338_778),  # 0.34 M
        (SmeCnn(channels=(64, 128), hidden=200), CIFAR100, 1_734_348),
        (Mlp(hidden=(1000, 1000)), FEMNIST, 785 * 1000 + 1001 * 1000 + 1001 * 62),
        (LeNet(), FEMNIST, 156 + 2416 + 401 * 120 + 121 * 84 + 85 * 62),  # official code: fc 400-120-84-62
        (LeNet(layout="dlg"), CIFAR10, 912 + 2 * 3612 + 769 * 10),  # official code: fc 768
        (TgiasLeNet(), MNIST, 44_426),  # LeNet-5 without padding
        (TgiasLeNet(), CIFAR10, 62_006),
        # FedMA's code: convolutions 32, 64, 128, 128, 256, 256 and fc 4096-512-512-10.
        (Vgg9(), CIFAR10, 896 + 18_496 + 73_856 + 147_584 + 295_168 + 590_080 + 4097 * 512 + 513 * 512 + 513 * 10),
        (ResNet8(), FEMNIST, 352 + 18_560 + 57_728 + 230_144 + 2049 * 1000 + 1001 * 62),  # fc 2048-1000-62
        (HE8, CIFAR10, 78_042),
        (ResNet18(), CIFAR10, 11_173_962),
        (ResNet18(), CIFAR100, 11_220_132),
        # No norms in the three shortcuts, and those before a wider stage are as narrow as the stage before.
        (ResNet18(preact=True), CIFAR10, 11_173_962 - 2 * (128 + 256 + 512) - 2 * (64 + 128 + 256)),
        (ResNet18(), IMAGENET, 11_689_512),
        (ShuffleNetV2(width=0.5), IMAGENET, 1_366_792),  # torchvision's documentation
        (ShuffleNetV2(), IMAGENET, 2_278_604),
        (ShuffleNetV2(width=1.5), IMAGENET, 3_503_624),
        (ShuffleNetV2(width=2), IMAGENET, 7_393_996),
        (TextCnn(), TEXTS, 1000 * 300 + 300 * 100 * (3 + 4 + 5) + 300 + 301 * 8),
    ],
)
def test_a_network_has_as_many_parameters_as_its_source_says(plugin: ModelPlugin, task: Task, published: int) -> None:
    assert parameters(on_meta(plugin, task)) == published


def test_the_transformer_has_the_sizes_of_the_released_code() -> None:
    dim, units = 384, 768
    attention, perceptron = dim * 3 * dim + dim * dim + dim, dim * units + units + units * dim + dim
    block = attention + perceptron + 2 * dim
    head = 2 * dim + dim * units + units + units * 62 + 62
    # One image token and a class token, both with positions; the first block has a norm of its own the fewer.
    expected = 784 * dim + dim + 2 * dim + dim + block + 3 * (block + 2 * dim) + head
    assert parameters(on_meta(VitApril(), FEMNIST)) == expected
    pixels = 16 - 784
    assert parameters(on_meta(VitApril(patch=4), FEMNIST)) == expected + pixels * dim + 48 * dim


PADDED = Task((6,), 3, vocabulary=20, padding=0)


@pytest.mark.parametrize("plugin", [TransformerEncoder(dim=16), TransformerDecoder(dim=16)])
def test_a_block_of_the_transformers_is_that_of_torch(plugin: ModelPlugin) -> None:
    """Which computes attention another way, with one matrix for queries, keys and values."""
    model: Any = built(plugin, TEXTS).double()
    block, theirs = (
        model.blocks[0],
        nn.TransformerEncoderLayer(16, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True),
    )
    attention = block.attention
    projections = (attention.query, attention.key, attention.value)
    theirs.double().load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([p.weight for p in projections]),
            "self_attn.in_proj_bias": torch.cat([p.bias for p in projections]),
            **{f"self_attn.out_proj.{key}": value for key, value in attention.output.state_dict().items()},
            **{f"linear1.{key}": value for key, value in block.perceptron[0].state_dict().items()},
            **{f"linear2.{key}": value for key, value in block.perceptron[2].state_dict().items()},
            **{f"norm{n}.{key}": v for n in (1, 2) for key, v in getattr(block, f"norm{n}").state_dict().items()},
        }
    )
    states = torch.randn(3, 20, 16, dtype=torch.float64, generator=generator("states"))
    real = torch.arange(20) < torch.tensor([[20], [13], [1]])
    seen = model.attention_mask(real)
    hidden = ~seen.repeat_interleave(4, 0)  # one mask a head
    torch.testing.assert_close(block(states, seen)[real], theirs(states, hidden)[real])
    assert bool(seen[0].all()) is isinstance(plugin, TransformerEncoder)


@pytest.mark.parametrize("plugin", [TransformerEncoder(dim=16), TransformerDecoder(dim=16)])
def test_padding_behind_a_text_changes_nothing_of_what_transformers_make_of_it(plugin: ModelPlugin) -> None:
    model: Any = built(plugin, PADDED).eval()
    text = torch.tensor([[7, 3, 9, 4]])
    padded = torch.cat([text, torch.zeros(1, 2, dtype=torch.int64)], 1)
    torch.testing.assert_close(model(padded), model(text))
    torch.testing.assert_close(model(model.embedding(padded)), model(text))
    assert not torch.allclose(model(torch.tensor([[7, 3, 9, 4, 5, 5]])), model(text))
    model(padded).sum().backward()
    assert not model.embedding.weight.grad[0].any()
    assert not model.positions.grad[4:].any()
    assert model.positions.grad[:4].any(1).all()
    assert model(torch.zeros(1, 6, dtype=torch.int64)).isfinite().all()  # a text without words


@pytest.mark.parametrize("plugin", [TransformerEncoder(dim=16, lora_rank=3), TransformerDecoder(dim=16, lora_rank=3)])
def test_with_adapters_these_and_the_last_layer_are_all_that_is_trained_and_sent(plugin: ModelPlugin) -> None:
    model, other = built(plugin, PADDED), built(plugin, PADDED, seed=1)
    names = [name for name, _ in model.named_parameters()]
    assert list(copy_state(model)) == names
    assert {re.sub(r"blocks\.\d\.attention\.(query|key|value|output)", "attention", name) for name in names} == {
        "attention.down.weight", "attention.up.weight", "linear.weight", "linear.bias",
    }  # fmt: skip
    held, same = dict(model.named_buffers()), dict(other.named_buffers())
    assert all(torch.equal(tensor, same[name]) for name, tensor in held.items())  # whatever the seed
    assert "blocks.0.attention.query.base.weight" in held
    tokens = torch.tensor([[7, 3, 9, 4, 0, 0], [2, 1, 5, 5, 8, 6]])
    slopes = dict(zip(names, torch.autograd.grad(model(tokens).square().sum(), list(model.parameters())), strict=True))
    assert all(bool(slope.any()) != name.endswith("down.weight") for name, slope in slopes.items())
    other.load_state_dict(copy_state(model))
    torch.testing.assert_close(other(tokens), model(tokens))


def test_an_adapted_layer_is_the_layer_and_a_product_of_two_matrices() -> None:
    layer = LoraLinear(nn.Linear(5, 4), 2)
    inputs = torch.randn(3, 5, generator=generator("states"))
    torch.testing.assert_close(layer(inputs), layer.base(inputs))
    nn.init.ones_(layer.up.weight)
    merged = layer.base.weight + layer.up.weight @ layer.down.weight
    torch.testing.assert_close(layer(inputs), inputs @ merged.T + layer.base.bias)


def test_a_decoder_sees_what_is_before_a_place_and_reads_the_last_word() -> None:
    model: Any = built(TransformerDecoder(dim=16), PADDED).eval()
    assert model.attention_mask(torch.ones(1, 6, dtype=torch.bool))[0].equal(torch.ones(6, 6).tril().bool())
    features = []
    model.norm.register_forward_hook(lambda *given: features.append(given[2]))
    outputs = model(torch.tensor([[7, 3, 9, 0, 0, 0], [7, 3, 9, 4, 8, 1]]))
    torch.testing.assert_close(features[0][0, :3], features[0][1, :3])
    torch.testing.assert_close(outputs, model.linear(torch.stack([features[0][0, 2], features[0][1, 5]])))


@pytest.mark.parametrize(
    ("plugin", "task", "counts"),
    [
        (TgiasLeNet(), MNIST, {nn.Conv2d: 2, nn.BatchNorm2d: 0, nn.ReLU: 4, nn.MaxPool2d: 2, nn.Linear: 3}),
        *(
            (
                AlexNet(),
                task,
                {nn.Conv2d: 5, nn.BatchNorm2d: 5, nn.ReLU: 7, nn.MaxPool2d: 4, nn.Dropout: 2, nn.Linear: 3},
            )
            for task in (CIFAR10, IMAGENET)
        ),
        (AlexNet(batch_norm=False, hidden=()), IMAGENET, {nn.Conv2d: 5, nn.BatchNorm2d: 0, nn.Linear: 1}),
        (
            TextCnn(),
            TEXTS,
            {nn.Conv1d: 3, nn.ReLU: 0, nn.Sigmoid: 3, nn.AdaptiveMaxPool1d: 3, nn.Dropout: 1, nn.Linear: 1},
        ),
        (TextCnn(kernels=(3,)), TEXTS, {nn.Conv1d: 1, nn.Linear: 1}),
        (ConvNet(), CIFAR100, {nn.Conv2d: 8, nn.BatchNorm2d: 8, nn.ReLU: 8, nn.MaxPool2d: 2, nn.Linear: 1}),
        (Vgg9(), CIFAR10, {nn.Conv2d: 6, nn.Linear: 3}),
    ],
)
def test_layers_are_those_that_the_paper_counts(
    plugin: ModelPlugin, task: Task, counts: dict[type[nn.Module], int]
) -> None:
    modules = list(on_meta(plugin, task).modules())
    assert {kind: sum(isinstance(m, kind) for m in modules) for kind in counts} == counts


def test_the_convnet_ends_in_36_times_its_width_as_in_the_released_code() -> None:
    model = on_meta(ConvNet(width=64), CIFAR10)
    assert [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)] == [64, 128, 128, *[256] * 5]
    assert [m.in_features for m in model.modules() if isinstance(m, nn.Linear)] == [36 * 64]


@pytest.mark.parametrize("width", [2, 4])
def test_resnet18_multiplies_every_channel(width: int) -> None:
    plain, wide = (
        [m.out_channels for m in on_meta(ResNet18(width=w), CIFAR100).modules() if isinstance(m, nn.Conv2d)]
        for w in (1, width)
    )
    assert wide == [width * channels for channels in plain]


def test_a_narrow_resnet18_is_the_usual_one_with_fewer_channels() -> None:
    usual, narrow = (
        [m.out_channels for m in on_meta(model, CIFAR100).modules() if isinstance(m, nn.Conv2d)]
        for model in (ResNet18(width=2), ResNet18(width=2, channels=4))
    )
    assert [16 * channels for channels in narrow] == usual


def test_resnet18_takes_the_stem_for_large_images_from_64_pixels_on() -> None:
    def kernel(plugin: ResNet18, side: int) -> tuple[int, ...]:
        first = next(m for m in on_meta(plugin, Task((3, side, side), 10)).modules() if isinstance(m, nn.Conv2d))
        return tuple(int(k) for k in first.kernel_size)

    assert kernel(ResNet18(), 63) == (3, 3)
    assert kernel(ResNet18(), 64) == (7, 7)
    assert kernel(ResNet18(stem="cifar"), 64) == (3, 3)
    assert kernel(ResNet18(stem="imagenet"), 32) == (7, 7)


# Independent references.


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("plugin", "theirs"),
    [
        (ResNet18(), "resnet18"),
        (ShuffleNetV2(), "shufflenet_v2_x1_0"),
        (ShuffleNetV2(width=0.5), "shufflenet_v2_x0_5"),
    ],
)
def test_with_torchvisions_weights_the_logits_are_torchvisions(plugin: ModelPlugin, theirs: str) -> None:
    from torchvision.models import get_model

    task = Task((3, 96, 80), 11)
    with seed_globals("reference"):
        reference, images = get_model(theirs, num_classes=11), torch.rand(3, *task.input_shape)
        reference(images)  # running statistics that are not 0 and 1
    ours, weights = built(plugin, task), reference.state_dict()
    # Both list their layers in the order of the computation, but for shortcuts, which have shapes of their own.
    assert [v.shape for v in ours.state_dict().values()] == [v.shape for v in weights.values()]
    ours.load_state_dict(dict(zip(ours.state_dict(), weights.values(), strict=True)))
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), reference.eval()(images))


def test_the_vision_transformer_is_torchvisions() -> None:
    """Which embeds patches by a convolution, and has one matrix for queries, keys and values."""
    from torchvision.models.vision_transformer import VisionTransformer

    ours: Any = built(Vit(patch=8, dim=16, blocks=2), CIFAR10).double()
    norm = partial(nn.LayerNorm, eps=1e-5)
    theirs = VisionTransformer(32, 8, 2, 4, 16, 64, num_classes=10, norm_layer=norm).double()
    state = {
        "class_token": ours.tokens.class_token,
        "conv_proj.weight": ours.tokens.embedding.weight.reshape(16, 3, 8, 8),
        "conv_proj.bias": ours.tokens.embedding.bias,
        "encoder.pos_embedding": ours.tokens.positions,
        **{f"encoder.ln.{key}": value for key, value in ours.norm.state_dict().items()},
        **{f"heads.head.{key}": value for key, value in ours.linear.state_dict().items()},
    }
    for number, block in enumerate(ours.blocks):
        projections = (block.attention.query, block.attention.key, block.attention.value)
        parts = {"ln_1": block.norm1, "ln_2": block.norm2, "self_attention.out_proj": block.attention.output}
        parts |= {"mlp.0": block.perceptron[0], "mlp.3": block.perceptron[2]}
        of = {f"{part}.{key}": value for part, module in parts.items() for key, value in module.state_dict().items()}
        of |= {f"self_attention.in_proj_{key}": torch.cat([getattr(p, key) for p in projections]) for key in PARTS}
        state |= {f"encoder.layers.encoder_layer_{number}.{key}": value for key, value in of.items()}
    theirs.load_state_dict(state)
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=generator("images"))
    assert ours.tokens.positions.std().item() == pytest.approx(0.02, rel=0.1)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))


def test_attention_is_torchs() -> None:
    from fedsim.training.models.vit import _PatchAttention

    with seed_globals("attention"):
        ours, tokens = _PatchAttention(24, 4), torch.randn(3, 5, 24)
        reference = nn.MultiheadAttention(24, 4, batch_first=True)
    with torch.no_grad():
        reference.in_proj_weight.copy_(ours.queries_keys_values.weight)
        reference.in_proj_bias.zero_()
        reference.out_proj.load_state_dict(ours.output.state_dict())
        torch.testing.assert_close(ours(tokens), reference(tokens, tokens, tokens)[0])


def test_the_first_block_of_the_transformer_sees_the_embedded_patches_themselves() -> None:
    """What APRIL's closed form needs: no norm before the first attention, and no way around it."""
    model = built(VitApril(patch=14), FEMNIST)
    assert isinstance(model, nn.Sequential)
    tokens, first, second = list(model)[:3]
    assert not tokens.class_token.any()
    assert not tokens.positions.any()
    seen: list[Tensor] = []
    for block in (first, second):
        block.attention.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    images = torch.rand(2, 1, 28, 28)
    embedded = tokens(images)
    model(images)
    torch.testing.assert_close(seen[0], embedded)
    assert seen[1].mean(-1).abs().max() < 1e-5  # normalised
    first.attention.output.weight.data.zero_()
    first.attention.output.bias.data.zero_()
    assert torch.equal(first(embedded)[0], first(embedded + 1)[0])
    patch = images[0, 0, :14, :14].flatten()
    torch.testing.assert_close(embedded[0, 1], tokens.embedding(patch))


def test_shuffling_is_torchs() -> None:
    from fedsim.training.models.shufflenet import _shuffle_channels

    first, second = torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    assert torch.equal(_shuffle_channels(first, second), nn.ChannelShuffle(2)(torch.cat((first, second), 1)))


def test_a_linear_model_is_a_matrix_product() -> None:
    model = built(Linear(bias=False), Task((2, 3, 4), 0))
    (weight,) = model.parameters()
    images = torch.rand(5, 2, 3, 4)
    torch.testing.assert_close(model(images), images.reshape(5, 24) @ weight.T)


# Variants.


def test_the_released_lenet_is_the_softmax_of_the_papers() -> None:
    paper, released = built(LeNet(), FEMNIST), built(LeNet(released=True), FEMNIST)
    images = torch.rand(3, 1, 28, 28)
    torch.testing.assert_close(released(images), paper(images).softmax(1))


def test_the_released_mlp_clips_its_logits_at_zero() -> None:
    paper, released = (built(Mlp(output_relu=flag), FEMNIST) for flag in (False, True))
    images = torch.rand(3, 1, 28, 28)
    assert paper(images).min() < 0
    assert torch.equal(released(images), paper(images).relu())


def test_dlgs_weights_and_biases_are_uniform() -> None:
    values = torch.cat([p.detach().flatten() for p in built(LeNet(layout="dlg"), CIFAR10).parameters()])
    assert values.abs().max() <= 0.5
    assert values.std() == pytest.approx(1 / 12**0.5, abs=0.01)
    biases = [p for name, p in built(LeNet(layout="dlg"), CIFAR10).named_parameters() if name.endswith("bias")]
    assert torch.cat(biases).abs().max() > 0.45  # torch's default would be at most 1 / 75 ** 0.5


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "relu"])
@pytest.mark.parametrize("layout", ["classic", "dlg"])
def test_lenets_activation_can_be_chosen(layout: Any, activation: Any) -> None:
    kinds = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}
    model = on_meta(LeNet(layout=layout, activation=activation), CIFAR10)
    found = [type(m) for m in model.modules() if isinstance(m, tuple(kinds.values()))]
    assert found == [kinds[activation]] * (4 if layout == "classic" else 3)
    default = on_meta(LeNet(layout=layout), CIFAR10)
    assert any(isinstance(m, nn.Tanh if layout == "classic" else nn.Sigmoid) for m in default.modules())


def test_texts_may_be_given_as_tokens_or_as_their_embeddings() -> None:
    model = built(TextCnn(), TEXTS).eval()
    tokens = torch.randint(1000, (4, 20), generator=generator("tokens"))
    embeddings = model.embedding(tokens)  # type: ignore[operator]
    assert embeddings.shape == (4, 20, 300)
    assert torch.equal(model(tokens), model(embeddings))
    assert not torch.equal(model(tokens), model(embeddings + 0.1))


@pytest.mark.parametrize(
    "name",
    [
        "googlenet",
        "squeezenet1_1",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("vit_b_32", "maxvit_t")),
    ],
)
def test_a_network_of_torchvision_has_the_tasks_outputs_in_training_too(name: str) -> None:
    model = built(TorchVision(architecture=name), Task((3, 224, 224), 3))
    assert model.training
    assert model(torch.rand(2, 3, 224, 224)).shape == (2, 3)


# What holds for every network.


@EVERY
def test_gradients_of_gradients_reach_the_input(plugin: ModelPlugin, task: Task) -> None:
    model = built(plugin, task).eval()
    inputs = inputs_for(model, task)
    (gradient,) = torch.autograd.grad(matching(model, task, inputs), inputs)
    assert gradient.shape == inputs.shape
    assert gradient.isfinite().all()
    assert gradient.any()


SMOOTH = [
    (LeNet(), FEMNIST),
    (LeNet(activation="sigmoid"), FEMNIST),
    (LeNet(released=True), FEMNIST),
    (LeNet(layout="dlg"), CIFAR10),
    (LeNet(layout="dlg", activation="tanh"), CIFAR10),
    (VitApril(), FEMNIST),
    (VitApril(patch=7, blocks=2), FEMNIST),
    (Vit(patch=8, dim=32, blocks=2), CIFAR10),
    (TextCnn(), TEXTS),
    (TextCnn(kernels=(3,)), TEXTS),
]


@pytest.mark.parametrize(("plugin", "task"), SMOOTH)
def test_gradients_of_gradients_are_finite_differences(plugin: ModelPlugin, task: Task) -> None:
    model = built(plugin, task).double().eval()
    inputs = inputs_for(model, task)
    (gradient,) = torch.autograd.grad(matching(model, task, inputs), inputs)
    # Along the gradient itself, lest the difference drown in rounding.
    direction, step = gradient / gradient.norm(), 1e-4
    ahead, behind = (matching(model, task, (inputs + s * direction).detach()) for s in (step, -step))
    assert gradient.norm() > 0
    assert ((ahead - behind) / (2 * step)).item() == pytest.approx(gradient.norm().item(), rel=1e-4)


@EVERY
def test_weights_follow_the_seed(plugin: ModelPlugin, task: Task) -> None:
    first, again, other = (built(plugin, task, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@EVERY
def test_building_leaves_the_global_generator_under_its_seed(plugin: ModelPlugin, task: Task) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    built(plugin, task)
    assert torch.equal(torch.random.get_rng_state(), before)


SMALLEST = [
    (SmeCnn(), 4),
    (LeNet(), 12),
    (LeNet(layout="dlg"), 1),
    (TgiasLeNet(), 16),
    (AlexNet(), 16),
    (AlexNet(stride=4), 61),
    (Vgg9(), 8),
    (ResNet8(), 4),
    (HE8, 4),
    (ResNet18(channels=8), 8),
    (ResNet18(stem="imagenet", channels=8), 32),
    (ConvNet(width=4), 9),
    (ShuffleNetV2(width=0.5), 32),
    (VitApril(patch=5, blocks=1), 5),
    (Vit(patch=5, dim=8, blocks=1), 5),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("plugin", "smallest"), SMALLEST)
def test_images_of_any_size_and_depth_are_taken_down_to_the_smallest(plugin: ModelPlugin, smallest: int) -> None:
    sizes = [(smallest, smallest), (smallest * 2, smallest * 3)]
    sizes += [] if isinstance(plugin, Vit | VitApril) else [(smallest, smallest + 5), (smallest + 18, smallest + 1)]
    for channels, (height, width) in zip((1, 3, 2, 4), sizes, strict=False):
        for task in (Task((channels, height, width), 3), Task((channels, height, width), 0)):
            outputs = built(plugin, task).eval()(torch.rand(2, channels, height, width))
            assert outputs.shape == (2, task.outputs)
            assert outputs.isfinite().all()
    if smallest > 1:
        expected = (
            f"takes images of at least {smallest} x {smallest}, got inputs of shape 1 x {smallest} x {smallest - 1}"
        )
        with pytest.raises(ConfigError, match=f"^model: [a-z0-9-]+ {expected}; choose another model or data set$"):
            plugin.build(Task((1, smallest, smallest - 1), 3))


@pytest.mark.parametrize("height", [28, 112, 127, 128, 130, 224])
def test_alexnets_shapes_fit_on_both_sides_of_the_change_of_stride(height: int) -> None:
    task = Task((3, height, 130), 5)
    assert on_meta(AlexNet(), task)(torch.rand(2, *task.input_shape, device="meta")).shape == (2, 5)


# Refusals.


@pytest.mark.parametrize(
    ("plugin", "task", "message"),
    [
        (Linear(), TEXTS, "model: linear takes numbers, got texts of 20 tokens; choose text-cnn"),
        (Mlp(), TEXTS, "model: mlp takes numbers, got texts of 20 tokens; choose text-cnn"),
        (
            TextCnn(),
            TABLE,
            "model: text-cnn takes texts of at least 5 tokens, got inputs of shape 12; "
            "choose another model or data set",
        ),
        (
            TextCnn(),
            Task((4,), 8, vocabulary=9),
            "model: text-cnn takes texts of at least 5 tokens, got texts of 4 tokens; choose another model or data set",
        ),
        (
            Vgg9(),
            TEXTS,
            "model: vgg9 takes images of at least 8 x 8, got texts of 20 tokens; choose another model or data set",
        ),
        (
            AlexNet(),
            TABLE,
            "model: alexnet takes images of at least 16 x 16, got inputs of shape 12; choose another model or data set",
        ),
        (
            LeNet(released=True),
            Task((1, 28, 28), 0),
            "model: lenet with released = true takes classes, got a regression; choose released = false",
        ),
        (
            VitApril(patch=5),
            FEMNIST,
            "model: vit-april takes images whose sides are multiples of 5, got inputs of shape 1 x 28 x 28; "
            "choose another patch",
        ),
        (
            Vit(),
            Task((3, 30, 32), 10),
            "model: vit takes images whose sides are multiples of 4, got inputs of shape 3 x 30 x 32; "
            "choose another patch",
        ),
        (
            TorchVision(),
            FEMNIST,
            "model: torchvision's resnet18 takes images with three channels, got inputs of shape 1 x 28 x 28; "
            "choose another model or data set",
        ),
        (
            TorchVision(architecture="vit_b_16"),
            Task((3, 32, 48), 2),
            "model: torchvision's vit_b_16 takes square images, got inputs of shape 3 x 32 x 48; "
            "choose another model or data set",
        ),
        (
            TorchVision(),
            TABLE,
            "model: torchvision's resnet18 takes images of at least 1 x 1, got inputs of shape 12; "
            "choose another model or data set",
        ),
        (
            TorchVision(architecture="resnet19"),
            CIFAR10,
            "model: torchvision has no classifier called 'resnet19', did you mean 'resnet18'?",
        ),
    ],
)
def test_an_unsuited_task_is_refused_in_one_sentence(plugin: ModelPlugin, task: Task, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plugin.build(task)
    assert str(caught.value) == message


@pytest.mark.parametrize(("name", "side"), [("alexnet", 32), ("maxvit_t", 64), ("vit_b_16", 24)])
def test_a_network_of_torchvision_that_cannot_take_an_image_says_why(name: str, side: int) -> None:
    with pytest.raises(ConfigError) as caught:
        TorchVision(architecture=name).build(Task((3, side, side), 2))
    assert re.fullmatch(
        rf"model: torchvision's {name} takes images of another size \(.+\), "
        rf"got inputs of shape 3 x {side} x {side}; choose another model or data set",
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mlp", {"hidden": [0]}, "model.hidden.0: expected at least 1, got 0"),
        ("mlp", {"dropout": 1.0}, "model.dropout: expected a value below 1, got 1.0"),
        ("sme-cnn", {"hidden": 0}, "model.hidden: expected at least 1, got 0"),
        (
            "lenet",
            {"layout": "dlg", "released": True},
            "model: released: expected false with layout 'dlg', only 'classic' has such a variant",
        ),
        ("lenet", {"activation": "gelu"}, "model.activation: input should be 'tanh', 'sigmoid' or 'relu', got 'gelu'"),
        ("tgias-lenet", {"hidden": [0, 1]}, "model.hidden.0: expected at least 1, got 0"),
        ("alexnet", {"stride": 0}, "model.stride: expected at least 1, got 0"),
        ("alexnet", {"dropout": -0.1}, "model.dropout: expected at least 0, got -0.1"),
        ("alexnet", {"hidden": [0]}, "model.hidden.0: expected at least 1, got 0"),
        ("vgg9", {"hidden": [0, 1]}, "model.hidden.0: expected at least 1, got 0"),
        ("convnet", {"width": 0}, "model.width: expected at least 1, got 0"),
        ("resnet18", {"width": 0}, "model.width: expected at least 1, got 0"),
        ("resnet18", {"channels": 0}, "model.channels: expected at least 1, got 0"),
        ("resnet8", {"channels": [0, 1, 1]}, "model.channels.0: expected at least 1, got 0"),
        ("resnet8", {"hidden": -1}, "model.hidden: expected at least 0, got -1"),
        ("shufflenet-v2", {"width": 3.0}, "model: width: expected one of 0.5, 1.0, 1.5, 2.0, got 3.0"),
        ("vit-april", {"dim": 10}, "model: dim: expected a multiple of heads (4), got 10"),
        ("vit-april", {"patch": 0}, "model.patch: expected at least 1, got 0"),
        ("vit-april", {"blocks": 0}, "model.blocks: expected at least 1, got 0"),
        ("vit", {"heads": 3}, "model: dim: expected a multiple of heads (3), got 128"),
        ("vit", {"mlp_ratio": 0}, "model.mlp_ratio: expected at least 1, got 0"),
        ("text-cnn", {"kernels": []}, "model.kernels: expected a length of at least 1, got []"),
        ("text-cnn", {"channels": 0}, "model.channels: expected at least 1, got 0"),
        ("text-cnn", {"dropout": 1.0}, "model.dropout: expected a value below 1, got 1.0"),
        ("transformer-encoder", {"dim": 10}, "model: dim: expected a multiple of heads (4), got 10"),
        ("transformer-decoder", {"blocks": 0}, "model.blocks: expected at least 1, got 0"),
        ("transformer-decoder", {"dropout": 1.0}, "model.dropout: expected a value below 1, got 1.0"),
        ("transformer-decoder", {"lora_rank": 129}, "model: lora_rank: expected at most dim (128), got 129"),
    ],
)
def test_a_bad_setting_is_refused_in_one_sentence(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        registry.build("models", name, settings, "model")


# Dependencies and documents.


def test_the_table_of_models_names_every_one_of_ours() -> None:
    script = load_script(Path(__file__).parents[4] / "docs" / "model_table.py")
    ours = {
        n
        for n in registry.registered_names("models")
        if registry.find_entry_point("models", n).value.startswith("fedsim.")
    }
    assert {row[0] for row in script.ROWS} == ours
    # Two operations a weight of each linear layer: 784 x 1000 + 1000 x 1000 + 1000 x 62.
    assert script.costs("mlp", {"hidden": (1000, 1000)}, FEMNIST) == (1_848_062, 2 * 1_846_000)
