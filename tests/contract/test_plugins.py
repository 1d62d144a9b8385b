"""What every plug-in of this distribution keeps to; a new one is tested by being registered.

The plug-ins of another installed distribution are tested by naming it, and then without what is house style:

    FEDSIM_CONTRACT=my-plugins pytest tests/contract
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.memory import memory_of
from clients.mods import defended
from fedsim.attacks import Attack, Knowledge, Paper, PartialRecords, Records
from fedsim.datasets import Dataset
from fedsim.defense import Defense, Guarantee, Poisson, of_examples, remembers
from fedsim.errors import ConfigError, DataError, KnowledgeError, PluginError
from fedsim.experiments.reading import load_config
from fedsim.findings import Finding, Inference, LocalModel, Reconstruction, Representatives, Texts
from fedsim.knowledge import FACTS
from fedsim.models.mlp import Mlp
from fedsim.models.text_cnn import TextCnn
from fedsim.plugins import registry
from fedsim.randomness import generator
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.task import Task, squared_error
from fedsim.wire.messages import Update
from fedsim.wire.payloads import Payload

HOUSE = "fedsim-curious"
OWNER = os.environ.get("FEDSIM_CONTRACT", HOUSE)
house_style = pytest.mark.skipif(OWNER != HOUSE, reason="house style is asked of nobody else")


def of(owner: str, group: registry.Group) -> list[str]:
    """Names that the distribution `owner` alone registers, whether or not they load."""
    found: list[str] = []
    for name in registry.names(group):
        try:
            dist = registry.entry(group, name).dist
        except PluginError:  # two distributions claim it, which says nothing about either
            continue
        found += [name] if dist is not None and dist.name == owner else []
    return found


PLUGINS = [
    pytest.param(group, name, id=f"{group}-{name}")
    for group in registry.GROUPS
    if group != "strategies"
    for name in of(OWNER, group)
]
ATTACKS, DEFENSES = of(OWNER, "attacks"), of(OWNER, "defenses")
KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@pytest.mark.parametrize(("group", "name"), PLUGINS)
def test_a_plugin_is_a_frozen_dataclass_that_needs_no_settings(group: registry.Group, name: str) -> None:
    cls = registry.load(group, name)
    plugin = registry.build(group, name, {}, "here")
    assert plugin == cls()
    assert vars(cls)["__dataclass_params__"].frozen
    assert not inspect.isabstract(cls)
    for field in dataclasses.fields(cls):
        assert field.kw_only, field.name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plugin, field.name, None)


@pytest.mark.parametrize(("group", "name"), PLUGINS)
def test_a_plugin_survives_repr_pickle_and_its_own_settings(group: registry.Group, name: str) -> None:
    cls = registry.load(group, name)
    plugin = cls()
    assert eval(repr(plugin), {cls.__name__: cls}) == plugin
    assert pickle.loads(pickle.dumps(plugin)) == plugin
    assert hash(plugin) == hash(cls())
    assert registry.build(group, name, dataclasses.asdict(plugin), "here") == plugin


@house_style
@pytest.mark.parametrize(("group", "name"), PLUGINS)
def test_a_plugin_explains_itself(group: registry.Group, name: str) -> None:
    cls = registry.load(group, name)
    text = inspect.getdoc(cls)
    assert KEBAB.fullmatch(name)
    assert text
    assert text.splitlines()[0].endswith(".")
    if group in ("attacks", "defenses"):
        assert "References:" in text
        assert "Differs:" in text
        assert isinstance(cls.paper, Paper)
        assert 1980 < cls.paper.year < 2100
    explained = "\n".join(inspect.getdoc(base) or "" for base in cls.__mro__)
    for field in dataclasses.fields(cls):
        assert re.search(rf"^\s+{field.name}: ", explained, re.MULTILINE), f"{field.name} is not explained"


@pytest.mark.parametrize("name", of(OWNER, "strategies"))
def test_a_strategy_is_built_from_no_more_than_it_demands(name: str) -> None:
    from flwr.serverapp.strategy import Strategy

    known = registry.parameters(registry.load("strategies", name))
    demanded = {key: 0.1 for key, parameter in known.items() if parameter.default is parameter.empty}
    assert isinstance(registry.build("strategies", name, demanded, "strategy"), Strategy)


# Attacks.


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Mlp(hidden=(12,)).build(Task((1, 8, 8), 10))


KNOWN = Knowledge(
    model=build_model,
    loss=cross_entropy,
    input_shape=(1, 8, 8),
    num_classes=10,
    value_range=([0.0], [1.0]),
    input_mean=[0.3],
    input_std=[0.3],
    learning_rate=0.1,
    local_epochs=1,
    batch_size=3,
    optimizer="sgd",
    momentum=0.0,
    weight_decay=0.0,
    proximal_mu=0.0,
    labels=torch.tensor([1, 4, 4]),
    records=Records(inputs=torch.rand((3, 1, 8, 8), generator=generator("inputs")), labels=torch.tensor([1, 4, 4])),
)


def build_text_model() -> nn.Module:
    torch.manual_seed(0)
    return TextCnn(kernels=(3,), channels=8, dimension=6, pool=2).build(Task((6,), 10, 20)).eval()


KNOWN_OF_TEXTS = dataclasses.replace(
    KNOWN, model=build_text_model, input_shape=(6,), value_range=None, input_mean=None, input_std=None
)


def build_table_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1, bias=False)


def table_rows() -> tuple[Tensor, Tensor]:
    """Two numbers and a category of two, and what is regressed on them."""
    numbers, targets = torch.randn((6, 3), generator=generator("rows")).split([2, 1], 1)
    return torch.cat([numbers, torch.eye(2)[torch.tensor([0, 1, 1, 0, 1, 0])]], 1), targets.squeeze(1)


def table_knowledge() -> Knowledge:
    inputs, targets = table_rows()
    known = inputs.clone()
    known[:, 2:4] = 0
    return Knowledge(
        model=build_table_model,
        loss=squared_error,
        input_shape=(4,),
        learning_rate=0.1,
        local_epochs=1,
        batch_size=6,
        optimizer="sgd",
        momentum=0.0,
        weight_decay=0.0,
        proximal_mu=0.0,
        labels=targets.sort().values,
        records=Records(inputs=inputs, labels=targets),
        partial_records=PartialRecords(
            inputs=known, labels=targets, column="kind", features=slice(2, 4), categories=("a", "b")
        ),
    )


def subject(name: str) -> str:
    """What the attack called `name` is tried on: `texts`, a `table`, or `images`."""
    cls = registry.load("attacks", name)
    if cls.texts:
        return "texts"
    return "table" if "partial_records" in cls.needs or name.startswith("lmra") else "images"


def known_to(name: str) -> Knowledge:
    """Everything there is to know for this attack."""
    return {"texts": KNOWN_OF_TEXTS, "table": table_knowledge(), "images": KNOWN}[subject(name)]


def one_step(model: nn.Module, inputs: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    cross_entropy(model(inputs), torch.tensor([1, 4, 4])).backward()
    return before, {name: p.detach() - 0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Transcript:
    inputs = torch.rand((3, 1, 8, 8), generator=generator("inputs"))
    return recorded(tmp_path_factory.mktemp("recording") / "transcript", build_model, inputs)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Transcript:
    inputs = torch.randint(20, (3, 6), generator=generator("tokens"))
    return recorded(tmp_path_factory.mktemp("texts") / "transcript", build_text_model, inputs)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Transcript:
    """Weights of two clients who regress by full-batch steps, from a dozen models that are far apart."""
    inputs, targets = table_rows()
    recorder = Recorder(tmp_path_factory.mktemp("table") / "transcript")
    for number in range(1, 13):
        before = {"weight": torch.randn((1, 4), generator=generator("broadcast", number))}
        updates = []
        for client, sign in ((5, 1), (6, -1)):
            weight = before["weight"].clone().requires_grad_(True)
            squared_error(inputs @ weight.T, sign * targets).backward()
            assert weight.grad is not None
            after = {"weight": weight.detach() - 0.1 * weight.grad}
            updates.append(
                Update(
                    round=number, client=client, before=before, payload=Payload.dense(after, "weights"), num_examples=6
                )
            )
        recorder.write(number, updates)
    return Transcript(recorder.folder)


@pytest.fixture
def transcript(name: str, images: Transcript, texts: Transcript, table: Transcript) -> Transcript:
    """A recording of what the attack called `name` is for."""
    return {"texts": texts, "table": table, "images": images}[subject(name)]


def recorded(folder: Path, build: Callable[[], nn.Module], inputs: Tensor) -> Transcript:
    recorder = Recorder(folder)
    for number in (1, 2):
        before, after = one_step(build(), inputs)
        shrunk = {name: 0.9 * tensor for name, tensor in before.items()}  # of client 6, who is no victim
        recorder.write(
            number,
            [
                Update(
                    round=number, client=client, before=before, payload=Payload.dense(state, "weights"), num_examples=3
                )
                for client, state in ((5, after), (6, shrunk))
            ],
        )
        sent = {name: (tensor - after[name]) / 0.1 for name, tensor in before.items()}
        gradient = Update(
            round=number + 2, client=5, before=before, payload=Payload.dense(sent, "gradient"), num_examples=3
        )
        recorder.write(number + 2, [gradient])
    return Transcript(folder)


SPECIAL: dict[str, dict[str, Any]] = {
    "lmra": {"hidden": "16x2", "learning_rate": 1e-3, "epochs": 500, "minimise_epochs": 20},
    "lmra-dummy-data": {"training_iterations": 5},
    "see-through-gradients": {"bn_weight": 0.0},  # the network here has no BatchNorm
    "tgias-ro": {"gradients": 2},
    "tgias-ro-text": {"gradients": 2, "refinements": 1},
}


def attack_with(name: str) -> Attack:
    """The attack with its defaults, but for a few iterations."""
    few = {"iterations": 6} if "iterations" in registry.parameters(registry.load("attacks", name)) else {}
    attack: Attack = registry.build("attacks", name, few | SPECIAL.get(name, {}), "attack")
    return attack


OF_GRADIENTS = ("tgias-ro", "tgias-ro-text")
"""Attacks on several rounds that read gradients; all others read weights."""


def rounds_for(name: str, transcript: Transcript) -> list[int]:
    """Which rounds of `transcript` the attack called `name` is shown."""
    if not registry.load("attacks", name).temporal:
        return [1]
    if name in OF_GRADIENTS:
        return [3, 4]
    return transcript.rounds if subject(name) == "table" else [1, 2]


def run(name: str, transcript: Transcript, knowledge: Knowledge | None = None, seed: int = 0) -> Finding:
    return run_with(generator(seed), name, transcript, knowledge)


def run_with(rng: torch.Generator, name: str, transcript: Transcript, knowledge: Knowledge | None = None) -> Finding:
    shown, known = transcript.only(rounds_for(name, transcript)), knowledge or known_to(name)
    return attack_with(name).run(shown, known, victim=5, rng=rng)


def check_reconstruction(finding: Reconstruction | Texts) -> None:
    data = finding.data if isinstance(finding, Reconstruction) else finding.tokens
    if isinstance(finding, Representatives):  # one a class or so, not one an example
        assert data.shape[1:] == (1, 8, 8)
        assert set(finding.labels.tolist()) <= set(range(10))
    else:
        assert data.shape == ((3, 6) if isinstance(finding, Texts) else (3, 1, 8, 8))
    assert data.dtype == (torch.int64 if isinstance(finding, Texts) else torch.float32)
    assert finding.labels.shape == (len(data),)


def check_local_model(finding: LocalModel, transcript: Transcript) -> None:
    sent = transcript.update(transcript.rounds[0], 5).after
    assert list(finding.state) == list(sent)
    assert all(finding.state[key].shape == tensor.shape for key, tensor in sent.items())
    assert all(finding.state[key].dtype == tensor.dtype for key, tensor in sent.items())


def check_inference(finding: Inference, known: Knowledge) -> None:
    records = known.records if finding.of == "source" else known.partial_records
    assert records is not None
    assert len(finding.scores) == len(records.inputs)
    assert finding.scores.is_floating_point()
    assert finding.candidates.tolist() == ([5, 6] if finding.of == "source" else [0, 1])


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_finishes_and_claims_something_that_can_be_judged(name: str, transcript: Transcript) -> None:
    finding = run(name, transcript)
    assert isinstance(finding, Texts) == registry.load("attacks", name).texts
    if isinstance(finding, LocalModel):
        check_local_model(finding, transcript)
    elif isinstance(finding, Inference):
        check_inference(finding, known_to(name))
    else:
        check_reconstruction(finding)
    for tensor in finding.tensors.values():
        assert tensor.device.type == "cpu"
        assert not tensor.requires_grad


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_with_the_same_seed_finds_the_same_bytes(name: str, transcript: Transcript) -> None:
    torch.manual_seed(1)
    first = run(name, transcript, seed=1).tensors
    torch.manual_seed(2)
    again = run(name, transcript, seed=1).tensors
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    rng = generator(3)
    untouched, other = rng.get_state(), run_with(rng, name, transcript).tensors
    if torch.equal(rng.get_state(), untouched):  # it draws nothing, or not from what it was given
        assert all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_leaves_the_global_generator_alone(name: str, transcript: Transcript) -> None:
    build = known_to(name).model
    assert build is not None
    build()
    state = torch.random.get_rng_state()
    run(name, transcript)
    build()
    assert torch.equal(torch.random.get_rng_state(), state)


def only(known: Knowledge, names: frozenset[str]) -> Knowledge:
    return Knowledge(**{name: getattr(known, name) for name in names})


@pytest.mark.parametrize("name", ATTACKS)
def test_what_an_attack_declares_to_need_is_exactly_sufficient(name: str, transcript: Transcript) -> None:
    attack = attack_with(name)
    assert attack.needs <= set(FACTS)
    further = {"labels"} if name == "idlg" else set()  # without them it reads one example's, and here are three
    known = known_to(name)
    run(name, transcript, only(known, attack.needs | further))
    for withheld in attack.needs:
        with pytest.raises(KnowledgeError, match=f"{type(attack).__name__} needs {withheld}, which the threat model"):
            run(name, transcript, only(known, attack.needs - {withheld}))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_reads_what_it_declares_and_nothing_else(name: str, transcript: Transcript) -> None:
    """With all at hand it finds what it finds with the declared alone, and what it declares to use it reads."""
    attack, known, read = attack_with(name), known_to(name), set[str]()

    class Watched(Knowledge):
        """Notes who reads which field, but for copies of the whole."""

        def __getattribute__(self, field: str) -> Any:
            value = super().__getattribute__(field)
            if sys._getframe(1).f_code.co_filename != dataclasses.__file__ and value is getattr(known, field, self):
                read.add(field)
            return value

    shown = transcript.only(rounds_for(name, transcript))
    everything = Watched(**{field: getattr(known, field) for field in (*FACTS, "device")})
    whole = attack._run(shown, everything, 5, generator(0), lambda *_: None)
    if not attack.uses <= read:  # some facts serve to count labels that are withheld
        attack._run(shown, dataclasses.replace(everything, labels=None), 5, generator(0), lambda *_: None)
    assert attack.uses <= read, attack.uses - read
    declared = run(name, transcript).tensors
    assert all(torch.equal(tensor, declared[key]) for key, tensor in whole.tensors.items())


@pytest.mark.parametrize("name", [name for name in ATTACKS if registry.load("attacks", name).needs])
def test_a_withheld_need_is_an_error_before_any_work(name: str) -> None:
    """Neither the transcript nor the generator is touched."""
    with pytest.raises(KnowledgeError) as caught:
        attack_with(name).run(None, Knowledge(), victim=0, rng=None)  # type: ignore[arg-type]
    assert all(need in str(caught.value) for need in attack_with(name).needs)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_does_not_change_what_it_is_given(name: str, transcript: Transcript) -> None:
    known = known_to(name)
    assert known.labels is not None
    assert known.model is not None
    before, labels, shared = transcript.hash(), known.labels.clone(), known.model()
    weights = {key: value.clone() for key, value in shared.state_dict().items()}
    run(name, transcript, dataclasses.replace(known, model=lambda: shared))
    assert transcript.hash() == before
    assert torch.equal(known.labels, labels)
    assert all(torch.equal(value, weights[key]) for key, value in shared.state_dict().items())
    assert all(p.grad is None for p in shared.parameters())


@pytest.mark.parametrize("name", ATTACKS)
def test_progress_is_told_up_to_the_last_iteration(name: str, transcript: Transcript) -> None:
    seen: list[tuple[int, int, Mapping[str, float]]] = []
    attack = attack_with(name)
    attack.run(
        transcript.only(rounds_for(name, transcript)),
        known_to(name),
        victim=5,
        rng=generator(0),
        progress=lambda *event: seen.append(event),
    )
    assert seen
    assert seen[-1][0] == seen[-1][1]
    assert [step for step, _, _ in seen] == sorted({step for step, _, _ in seen})
    assert all(math.isfinite(values["objective"]) for _, _, values in seen)


# Defenses.


def state() -> dict[str, Tensor]:
    return {"a": torch.randn((4, 3), generator=generator("a")), "b": torch.randn(5, generator=generator("b"))}


@pytest.mark.parametrize("name", DEFENSES)
def test_a_defense_keeps_shapes_and_inputs_and_follows_its_generator(name: str) -> None:
    defense: Defense = registry.build("defenses", name, {}, "defense")

    def update(given: dict[str, Tensor], *, rng: torch.Generator) -> Any:
        return defense.on_update(given, rng=rng, **({"memory": {}} if remembers(defense) else {}))

    for hook in (defense.on_gradient, update):
        given = state()
        first, again = hook(given, rng=generator(1)), hook(given, rng=generator(1))
        assert {k: (v.shape, v.dtype) for k, v in first.items()} == {k: (v.shape, v.dtype) for k, v in given.items()}
        assert all(torch.equal(first[k], again[k]) for k in first)
        assert all(torch.equal(given[k], v) for k, v in state().items())
        zero = hook({k: torch.zeros_like(v) for k, v in given.items()}, rng=generator(1))
        assert all(torch.isfinite(v).all() for v in zero.values())
    inputs, labels = torch.rand((3, 1, 8, 8), generator=generator("x")), torch.tensor([1, 2, 3])
    sampling = defense.sampling(100, 10)
    assert sampling is None or isinstance(sampling, Poisson)
    for count in (3, 0):  # Poisson sampling may leave a batch empty
        each = {name: torch.randn(count, *tensor.shape, generator=generator(2)) for name, tensor in state().items()}
        made = of_examples(defense, each, 3.0, state(), generator(1))
        assert all(torch.isfinite(tensor).all() for tensor in made.values())
    batch, targets = defense.on_batch(inputs.clone(), labels, rng=generator(1))
    assert batch.dtype == inputs.dtype
    assert len(batch) == len(targets)


@pytest.mark.parametrize("name", DEFENSES)
def test_what_a_defense_keeps_can_be_carried_from_round_to_round(name: str) -> None:
    defense: Defense = registry.build("defenses", name, {}, "defense")
    before = {name: torch.zeros_like(tensor) for name, tensor in state().items()}

    def rounds() -> list[dict[str, Tensor]]:
        kept, sent = RecordDict(), []
        for number in range(3):
            with memory_of(defense, "0", kept) as memory:
                payload = Payload.dense(state(), "weights")
                sent.append(dict(defended(defense, before, payload, generator(number), memory).arrays()))
        return sent

    for one, again in zip(rounds(), rounds(), strict=True):
        assert all(torch.equal(one[key], again[key]) for key in one), "it keeps something elsewhere"


@pytest.mark.parametrize("name", DEFENSES)
def test_what_a_defense_promises_is_a_guarantee_or_nothing(name: str) -> None:
    defense: Defense = registry.build("defenses", name, {}, "defense")
    promise = defense.guarantee(10, 1e-5)
    assert promise is None or (isinstance(promise, Guarantee) and promise.epsilon > 0)


# Data sets and models.

SETTINGS: dict[str, dict[str, Any]] = {
    "csv": {"path": "flight-prices/Clean_Dataset.csv.gz", "target": "class", "drop": ["flight"]},
    "emnist": {"files": "test"},
    "femnist": {"folder": "femnist-digits"},
    "image-folder": {"path": "imagenet-sample-224/val"},
    "leaf": {"path": "leaf/shakespeare"},
}
"""What a data set or model needs set, to find what is at hand."""


@pytest.mark.parametrize("name", of(OWNER, "datasets"))
def test_a_dataset_keeps_to_its_range_and_says_where_it_comes_from(name: str) -> None:
    from fedsim.experiments.build import data_folder

    try:
        dataset: Dataset = registry.build("datasets", name, SETTINGS.get(name, {}), "data").load(data_folder())
    except DataError as error:
        pytest.skip(str(error))
    assert dataset.name == name
    assert dataset.source
    assert dataset.licence
    low, high = (0, dataset.vocabulary - 1) if dataset.vocabulary else dataset.value_range
    for part in (dataset.train, dataset.test):
        sample = part.inputs(slice(0, 500))
        assert sample.dtype == (torch.int64 if dataset.vocabulary else torch.float32)
        assert low <= sample.min() < sample.max() <= high
        assert sample.shape[1:] == dataset.task.input_shape
        if dataset.num_classes:
            assert part.labels.dtype == torch.int64
            assert 0 <= part.labels.min() < part.labels.max() < dataset.num_classes
        else:
            assert part.labels.dtype == torch.float32
            assert part.labels.isfinite().all()


TASKS = [Task((1, 8, 8), 7), Task((1, 28, 28), 7), Task((3, 32, 32), 7), Task((3, 64, 64), 7), Task((12,), 7)]
TASKS += [Task((12,), 0), Task((20,), 7, vocabulary=30)]


@pytest.mark.parametrize("name", of(OWNER, "models"))
def test_a_model_takes_any_batch_and_learns_or_says_what_it_takes(name: str) -> None:
    plugin, fit = registry.build("models", name, SETTINGS.get(name, {}), "model"), 0
    for task in TASKS:
        try:
            model: nn.Module = plugin.build(task)
        except ConfigError as error:
            assert re.fullmatch("model: [^\n]+ takes [^\n]+, got [^\n]+", str(error))  # noqa: PT017
            continue
        fit += 1
        shape = (5, *task.input_shape)
        outputs = model(torch.randint(task.vocabulary, shape) if task.vocabulary else torch.rand(shape))
        assert outputs.shape == (5, task.outputs)
        task.loss(outputs, torch.zeros(5, dtype=torch.int64 if task.num_classes else torch.float32)).backward()
        assert all(p.grad is not None for p in model.parameters())
    assert fit


def test_a_plugin_is_named_in_a_file_and_found(tmp_path: Path) -> None:
    lines: list[str] = [f'[[attack]]\nname = "{name}"\n' for name in ATTACKS]
    (tmp_path / "all.toml").write_text("".join(lines))
    tables: Any = load_config(tmp_path / "all.toml").attack
    assert [table.name for table in tables] == ATTACKS


def test_strangers_plugins_are_tested_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not import, or has the name of one of ours, makes nothing here fail."""
    ours, theirs = (SimpleNamespace(name=owner) for owner in (HOUSE, "strange-plugins"))
    registered = {
        "sme": (EntryPoint("sme", "adversaries.x:Sme", "fedsim.attacks"),),
        "Broken_Name": (EntryPoint("Broken_Name", "nobody.has:This", "fedsim.attacks"),),
        "both": (EntryPoint("both", "a:B", "fedsim.attacks"), EntryPoint("both", "c:D", "fedsim.attacks")),
    }
    for entries, owner in zip(registered.values(), (ours, theirs, theirs), strict=True):
        for entry in entries:
            vars(entry)["dist"] = owner
    monkeypatch.setattr(registry, "_entries", lambda group: registered)
    assert of(HOUSE, "attacks") == ["sme"]
    assert of("strange-plugins", "attacks") == ["Broken_Name"]
