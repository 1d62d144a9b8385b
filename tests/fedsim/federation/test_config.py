"""The experiment file: what is refused, in which words, and that a saved one says the same again."""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch

from fedsim.base.errors import ConfigError, DataError, FedsimError, PluginError
from fedsim.base.task import Task
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import load_config, read_toml
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.federation.table_validation import validate_tables
from fedsim.plugins import registry

OFFLINE_DATA = ("digits", "handwriting", "leaf-synthetic", "shapes")
"""Data sets that need no files."""
TEXT = """
[model]
name = "mlp"
hidden = [16]

[training]
local_epochs = 1

[federation]
clients = 4
rounds = 2

[adversary]
victims = [0, 2]

[[attack]]
name = "sme"
iterations = 50

[[attack]]
name = "inverting-gradients"
label = "ig"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.toml"
    path.write_text(TEXT)
    return path


def build(path: Path, *overrides: str) -> Config:
    """All that happens before a federation starts."""
    config = resolve(load_config(path, overrides))
    Experiment(config).check()
    return config


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        # Unknown names come with the nearest known one.
        ("training.batchsize=3", "training.batchsize: unknown key, did you mean 'batch_size'?"),
        ("fedaration.clients=3", "fedaration: unknown key, did you mean 'federation'?"),
        ("adversary.knowledge.lables=true", "adversary.knowledge.lables: unknown key, did you mean 'labels'?"),
        ("attack.sme.iteration=5", "attack.sme.iteration: unknown setting for 'sme', did you mean 'iterations'?"),
        ("attack.smee.iterations=5", "no tables are called 'smee', did you mean 'sme'?"),
        ("attack.sme.name=smee", "attacks: nothing is called 'smee', did you mean 'sme'?"),
        ("model.name=sme_cnn", "models: nothing is called 'sme_cnn', did you mean 'sme-cnn'?"),
        ("data.name=digit", "datasets: nothing is called 'digit', did you mean 'digits'?"),
        ("data.name=qqq", "datasets: nothing is called 'qqq', known: adult, "),
        ("data.shape=3", "data.shape: unknown setting for 'digits', known: targets"),
        ("partition.name=dirichle", "partitions: nothing is called 'dirichle', did you mean 'dirichlet'?"),
        ("strategy.name=fedav", "strategies: nothing is called 'fedav', did you mean 'fedavg'?"),
        ("strategy.fraction_trian=1", "unknown setting for 'fedavg', did you mean 'fraction_train'?"),
        ("strategy.name=qfedavg", "strategy: 'qfedavg' needs client_learning_rate, which is not set"),
        ("defense=[{name='update-nois'}]", "defenses: nothing is called 'update-nois', did you mean 'update-noise'?"),
        ("defense=[{name='update-noise', clp=2}]", "defense.0.clp: unknown setting for 'update-noise', did you"),
        # Types.
        ("federation.clients='ten'", "federation.clients: input should be a valid integer, got 'ten'"),
        ("federation.clients=2.5", "federation.clients: input should be a valid integer, got 2.5"),
        ("federation.clients=true", "federation.clients: input should be a valid integer, got True"),
        ("federation.engine=3", "federation.engine: input should be a valid string or a table, got 3"),
        ("adversary.victims=everyone", "adversary.victims: input should be a list or 'all', got 'everyone'"),
        ("adversary.victims=[1.5]", "adversary.victims.0: input should be a valid integer, got 1.5"),
        ("adversary.knowledge.batch_size=2.5", "input should be a valid boolean or a valid integer, got 2.5"),
        ("adversary.knowledge.auxiliary=500", "got 500; true grants it, and adversary.auxiliary says how many"),
        ("attack.sme.iterations=1e2", "attack.sme.iterations: input should be a valid integer, got 100.0"),
        ("attack.sme.signed=1", "attack.sme.signed: input should be a valid boolean, got 1"),
        ("model.hidden=[16, 'a']", "model.hidden.1: input should be a valid integer, got 'a'"),
        ("attack=5", "attack: input should be a list, got 5"),
        ("attack=['sme']", "attack.0: input should be a table, got 'sme'"),
        ("federation=3", "federation: input should be a table, got 3"),
        ("defense={name='update-noise'}", "defense: this is a list of tables; write [[defense]]"),
        ("adversary.knowledge.loss={name='mse'}", "adversary.knowledge.loss: input should be a valid boolean or"),
        ("adversary.victims={a=1}", "adversary.victims: input should be a list or 'all', got {'a': 1}"),
        ("attack=[{iterations=3}]", "attack.0.name: field required"),
        ("measure=[{name='gradient-norm', memory=0}]", "measure.gradient-norm.memory: expected at least 1, got 0"),
        ("measure=[{name='gradient-norm', label='a', every='b'}]", "measure.a.every: input should be a valid integer"),
        (f"measure=[{{name='gradient-norm', every={1 << 65}}}]", "measure.gradient-norm.every: expected a whole"),
        ("measure=[{name='gradient-norm', every=09:00:00}]", "measure.gradient-norm.every: expected a number, a text"),
        ("measure=[{name='norm'}, {name='norm', every=0}]", "measure.1.every: expected at least 1, got 0"),
        ("federation.rounds=2024-01-01", "federation.rounds: expected a number, a text, a list or a table, got date"),
        # Values.
        ("federation.clients=0", "federation.clients: expected at least 1, got 0"),
        ("federation.timeout=inf", "federation.timeout: input should be a finite number, got inf"),
        ("federation.straggler_probability=nan", "straggler_probability: input should be a finite number, got nan"),
        ("training.batch_size=0", "training.batch_size: expected at least 1, got 0"),
        ("training.local_epochs=0", "training.local_epochs: expected at least 1, got 0"),
        ("training.learning_rate=-1", "training.learning_rate: expected a value above 0, got -1"),
        ("training.learning_rate=0", "training.learning_rate: expected a value above 0, got 0"),
        ("strategy={name='fedsgd', learning_rate=0.0}", "strategy.learning_rate: the server takes the steps, expect"),
        ("strategy={name='fedadam', eta=0.0}", "strategy.eta: expected a value above 0 and at most 1e+06, got 0.0"),
        ("training.learning_rate=nan", "training.learning_rate: input should be a finite number, got nan"),
        ("model.hidden=[0]", "model.hidden.0: expected at least 1, got 0"),
        ("model.hidden=[8, -1]", "model.hidden.1: expected at least 1, got -1"),
        ("model.dropout=1.0", "model.dropout: expected a value below 1, got 1.0"),
        ("model={name='sme-cnn', hidden=0}", "model.hidden: expected at least 1, got 0"),
        ("truth.zero='x'", "truth: expected client ids as keys, got 'zero'"),
        ("attack.sme.iterations=0", "attack.sme.iterations: expected at least 1, got 0"),
        ("attack.sme.step_size=inf", "attack.sme.step_size: expected a finite value, got inf"),
        ("attack.sme.step_size=-1", "attack.sme.step_size: expected a value above 0, got -1"),
        ("attack.sme.tv_weight=nan", "attack.sme.tv_weight: expected a finite value, got nan"),
        ("attack.sme.alpha=2", "attack.sme.alpha: expected at most 1, got 2"),
        ("attack.sme.alpha_step_size=0", "attack.sme.alpha_step_size: expected a value above 0, got 0"),
        ("attack.sme.label=../x", "attack.0.label: it names a folder: expected letters, digits and any of"),
        ("attack.sme.label=a/b", "attack.0.label: it names a folder"),
        (f"attack.sme.label={'x' * 61}", "attack.0.label: it names a folder: expected at most 60 characters, got 61"),
        ("adversary.repeats=0", "adversary.repeats: expected at least 1, got 0"),
        # Nonsense.
        (f"federation.rounds={10**26}", "federation.rounds: expected a whole number below 2^64, got one of 87 bits"),
        ("federation.rounds=1_000_000_000", "federation.rounds: expected at most 1000000, got 1000000000"),
        ("adversary.repeats=1_000_000_000", "adversary.repeats: expected at most 1000, got 1000000000"),
        ("federation.timeout=1e30", "federation.timeout: expected at most 100000000, got 1e+30"),
        ("training.momentum=2", "training.momentum: expected a value below 1, got 2"),
        ("training.local_epochs=10_000_000_000", "training.local_epochs: expected at most 1000000, got 10000000000"),
        (f"attack.sme.iterations={'9' * 5000}", "attack.sme.iterations: input should be a valid integer"),
        (f"attack.sme.iterations=0x{'f' * 5000}", "expected a whole number below 2^64, got one of 20000 bits"),
        (f"attack.sme.iterations={'[' * 5000}{']' * 5000}", "--set attack.sme.iterations: is nested too deeply"),
        (f"attack.sme.iterations={'[' * 300}{']' * 300}", "is nested too deeply"),
        (f"{'a.' * 5000}b=1", "is nested too deeply"),
        ('data.name="a\\u0000b"', "data.name: holds a NUL character; remove it"),
        ("data={name='csv', path='" + "x" * 300 + "'}", "data.path: a path of 300 characters is longer than files can"),
        ("model.start='~nobody-at-all/x'", "model.start: the home folder that '~nobody-at-all' stands for is unknown"),
        ("model.hidden=[1_000_000_000]", "GB of memory here; make it smaller"),
        ("model.hidden=[9_000_000_000_000_000_000]", "GB of memory here; make it smaller"),
        # Strategies.
        ("strategy.fraction_train=-0.1", "strategy.fraction_train: expected a fraction from 0 to 1, got -0.1"),
        ("strategy.fraction_train=0", "fraction_train: expected a fraction above 0, as with 0 no client trains, got 0"),
        ("strategy.fraction_train=true", "strategy.fraction_train: input should be a valid number, got True"),
        ("strategy.fraction_train=nan", "strategy.fraction_train: input should be a finite number, got nan"),
        ("strategy.min_train_nodes=2.5", "strategy.min_train_nodes: input should be a valid integer, got 2.5"),
        ("strategy.train_metrics_aggr_fn=x", "strategy.train_metrics_aggr_fn: input should be callable, got 'x'"),
        ("strategy.weighted_by_key=n", "expected 'num-examples' or 'train_loss', as clients call it, got 'n'"),
        ("strategy={name='fedadam', eta=nan}", "strategy.eta: input should be a finite number, got nan"),
        ("strategy={name='fedadam', eta=1e30}", "strategy.eta: expected a value above 0 and at most 1e+06, got 1e+30"),
        ("strategy={name='fedavgm', server_momentum=2}", "strategy.server_momentum: expected a value in [0, 1), got 2"),
        ("strategy={name='krum', num_malicious_nodes=50}", "expected 0 to 0 of the 4 clients of a round, got 50"),
        ("strategy={name='krum', num_malicious_nodes=-1}", "expected 0 to 0 of the 4 clients of a round, got -1"),
        ("strategy={name='multikrum', num_nodes_to_select=9}", "num_nodes_to_select: expected 1 to 4, the clients of"),
        ("strategy={name='fedtrimmedavg', beta=0.5}", "refuses these settings: `beta` must be in the range [0, 0.5)"),
        # Contradictions.
        ("training.local_steps=5", "training: set local_epochs or local_steps, exactly one of them"),
        ("adversary.victims=[0, 1, 2, 3, 4]", "adversary.victims: 5 clients named, but federation.clients is 4"),
        ("adversary.victims=[1, 2, 1]", "adversary.victims: 1 is named twice; name each once"),
        ("recording.rounds=[2, 2]", "recording.rounds: 2 is named twice; name each once"),
        ("adversary.victims=[4]", "adversary.victims: expected clients from 0 to 3, got 4"),
        ("adversary.victims=[-1]", "adversary.victims: expected clients from 0 to 3, got -1"),
        ("adversary.victims=[]", "adversary.victims: the list is empty; leave the key out, or name clients"),
        ("adversary.rounds=[3]", "adversary.rounds: expected rounds from 1 to 2, got 3"),
        ("adversary.rounds=[0]", "adversary.rounds: expected rounds from 1 to 2, got 0"),
        ("recording.clients=[9]", "recording.clients: expected clients from 0 to 3, got 9"),
        ("recording.rounds=[9]", "recording.rounds: expected rounds from 1 to 2, got 9"),
        ("attack.sme.label=ig", "two attacks are called 'ig'; give one of them a label"),
        ("strategy.min_train_nodes=99", "strategy.min_train_nodes: expected at most federation.clients = 4, got 99"),
        ("federation.clients=1_000_000", "federation.clients: 1000000 clients for 1438 examples; lower it"),
        # --set itself.
        ("noequals", "--set noequals: expected key=value, e.g. attack.sme.iterations=200"),
        ("=3", "--set =3: expected key=value"),
        (".=3", "--set .=3: expected key=value"),
        ("federation..clients=3", "expected key=value"),
        ("federation.clients.x=1", "'clients' is a value, not a table"),
        ("attack.iterations=5", "name one of them, e.g. attack.NAME.iterations"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(file: Path, override: str, sentence: str) -> None:
    with pytest.raises((ConfigError, PluginError)) as caught:
        build(file, override)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith(".")
    assert caught.value.exit_code == 2


def test_a_seed_that_nobody_guesses_counts_to_its_last_digit(file: Path) -> None:
    """As README advises; neighbours share nothing."""
    one, other = (Experiment(build(file, f"federation.seed={10**18 - 1 - less}")) for less in (0, 1))
    assert one.seed - other.seed == 1
    assert not torch.equal(one.data.train(0)[1], other.data.train(0)[1])
    assert any(not torch.equal(t, other.initial_state()[name]) for name, t in one.initial_state().items())


def test_errors_of_the_file_name_the_file(file: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(str(file))}: federation.clients: "):
        load_config(file, ["federation.clients=0"])


def test_a_sweep_is_no_experiment_and_says_what_runs_it(file: Path) -> None:
    file.write_text('[sweep]\nbase = "quickstart.toml"\n')
    with pytest.raises(ConfigError, match=re.escape(f"{file}: has a [sweep] table, so it is not a single experiment")):
        load_config(file)


def test_broken_toml_says_where(file: Path) -> None:
    file.write_text("[federation]\nclients = = 3\n")
    with pytest.raises(ConfigError, match=r"is not valid TOML: .*line 2"):
        load_config(file)
    file.write_bytes(b"\xff\xfe[federation]")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(file)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file or directory\)"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        load_config(tmp_path)


def test_an_empty_file_is_a_whole_experiment(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    config = build(tmp_path / "empty.toml")
    assert (config.data.name, config.strategy.name, config.model.name) == ("digits", "fedavg", "sme-cnn")


@pytest.mark.parametrize(
    "path", ["attack.sme.iterations", "attack.ig.iterations", "attack.inverting-gradients.iterations"]
)
def test_an_attack_is_set_by_name_or_label(file: Path, path: str) -> None:
    settings = {table.title: table.settings for table in build(file, f"{path}=5").attack}
    assert settings["sme" if "sme" in path else "ig"]["iterations"] == 5
    assert settings["ig" if "sme" in path else "sme"]["iterations"] != 5


def test_overrides_reach_every_table_also_those_that_the_file_leaves_out(file: Path) -> None:
    config = build(
        file, "strategy.fraction_train=0.5", "partition.name=dirichlet", "federation.seed=9", "model.hidden=[8, 8]"
    )
    assert config.strategy.settings == {"fraction_train": 0.5}
    assert config.strategy.name == "fedavg"
    assert config.partition.name == "dirichlet"
    assert config.federation.seed == 9
    assert list(config.model.settings["hidden"]) == [8, 8]


def test_values_are_toml_and_what_is_none_is_text(file: Path) -> None:
    tables = read_toml(file, ["a.i=1", "a.f=1e-3", "a.b=true", "a.l=[1, 2]", "a.q='x'", "a.t=fed avg", "a.e="])
    assert tables["a"] == {"i": 1, "f": 1e-3, "b": True, "l": [1, 2], "q": "x", "t": "fed avg", "e": ""}


def test_the_resolved_file_is_the_same_experiment_with_defaults_written_out(file: Path, tmp_path: Path) -> None:
    folder = OpenRun(tmp_path)
    config = build(file, "defense=[{name='update-noise', clip=2.0}]")
    folder.write_experiment(config)
    again = folder.read_experiment()
    assert again == config
    assert resolve(config) == config
    text = folder.experiment.read_text()
    expected = ("alpha_step_size = 0.001", "tv_weight = 0.01", "iterations = 50", "iterations = 1000", "clip = 2.0")
    for line in (*expected, "noise_multiplier = 0.0", 'label = "ig"'):
        assert line in text, line


def test_infinite_settings_of_plugins_survive_the_file_and_the_wire(file: Path, tmp_path: Path) -> None:
    """JSON has no infinity; a plug-in may take one all the same."""
    config = validate_tables(Config, {"strategy": {"name": "fedadam", "tau": float("inf")}}, "x")
    assert Config.model_validate_json(config.model_dump_json()).strategy.settings["tau"] == float("inf")
    folder = OpenRun(tmp_path)
    folder.write_experiment(config)
    assert folder.read_experiment() == config


def test_every_example_is_a_valid_file() -> None:
    examples = sorted((Path(__file__).parents[3] / "examples").glob("**/*.toml"))
    assert examples
    for path in examples:
        tables = read_toml(path)
        if not {"project", "sweep"} & tables.keys():  # an app has a pyproject.toml; sweeps have their own test
            validate_tables(Config if set(tables) - set(AttackFile.model_fields) else AttackFile, tables, str(path))


def test_every_example_begins_with_how_it_is_run_and_how_long_that_takes() -> None:
    folder = Path(__file__).parents[3] / "examples"
    for path in folder.glob("*.toml"):
        head = path.read_text(encoding="utf-8").partition("\n[")[0]
        assert re.search(rf"fedsim (run|sweep) examples/{path.name}", head), path.name
        assert re.search(r"seconds|minutes?\b", head), path.name
        assert "FEDSIM_DATA" in head or read_toml(path)["data"]["name"] in OFFLINE_DATA, path.name


@pytest.mark.parametrize("order", [["attack", "data"], ["data", "attack"]])
def test_the_order_of_tables_does_not_matter(tmp_path: Path, order: list[str]) -> None:
    tables = {"attack": [{"name": "sme"}], "data": {"name": "digits"}}
    (tmp_path / "x.toml").write_text(tomli_w.dumps({key: tables[key] for key in order}))
    assert load_config(tmp_path / "x.toml") == validate_tables(Config, tables, "x")


def idx(magic: int, array: np.ndarray) -> bytes:
    return magic.to_bytes(4, "big") + np.array(array.shape, ">i4").tobytes() + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny MNIST in torchvision's layout, one file gzipped."""
    home = tmp_path / "data" / "MNIST" / "raw"
    home.mkdir(parents=True)
    for stem, count in (("train", 40), ("t10k", 10)):
        pixels = np.arange(count * 784).reshape(count, 28, 28) % 256
        (home / f"{stem}-images-idx3-ubyte").write_bytes(idx(2051, pixels))
        (home / f"{stem}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(2049, np.arange(count) % 10)))
    packed = sorted(home.glob("*.gz"))  # they are not the official ones on purpose
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  MNIST/raw/{path.name}\n" for path in packed]
    (tmp_path / "data" / "SHA256SUMS").write_text("".join(lines))
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path / "data"))
    return home


def test_mnist_is_read_plain_and_gzipped(file: Path, mnist: Path) -> None:
    dataset = Experiment(build(file, "data.name=mnist")).dataset
    assert (len(dataset.train), len(dataset.test), dataset.task.input_shape) == (40, 10, (1, 28, 28))
    assert dataset.train.inputs().max() == 1.0


Harm = Callable[[Path], object]


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (shutil.rmtree, r"train-images-idx3-ubyte .*: no such file; on a machine with a network, .*--download"),
        (lambda home: (home / "t10k-labels-idx1-ubyte.gz").unlink(), r"t10k-labels-idx1-ubyte .*: no such file"),
        (lambda home: cut(home / "train-images-idx3-ubyte", 5000), "images-idx3-ubyte: is damaged .*download it again"),
        (lambda home: cut(home / "train-images-idx3-ubyte", 2), "is damaged"),
        (lambda home: cut(home / "train-images-idx3-ubyte", 0), "is damaged"),
        (lambda home: cut(home / "train-labels-idx1-ubyte.gz", 20), r"train-labels-idx1-ubyte\.gz: is damaged"),
        (lambda home: (home / "train-images-idx3-ubyte").write_bytes(b"<html>not found</html>" * 99), "is damaged"),
        (
            lambda home: (home / "train-images-idx3-ubyte").write_bytes(idx(2051, np.zeros((39, 28, 28)))),
            "images-idx3-ubyte: holds 39 images, but train-labels-idx1-ubyte.gz holds 40 labels",
        ),
    ],
    ids=["no folder", "no file", "cut images", "cut header", "empty", "cut gzip", "html", "counts differ"],
)  # fmt: skip
def test_damaged_or_missing_mnist_is_one_sentence(file: Path, mnist: Path, harm: Harm, sentence: str) -> None:
    harm(mnist)
    with pytest.raises(DataError, match=sentence) as caught:
        build(file, "data.name=mnist")
    assert caught.value.exit_code == 2


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def test_a_data_folder_that_is_not_given_or_not_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSIM_DATA", raising=False)
    with pytest.raises(DataError, match="'mnist' needs a data folder; give --data-dir DIR or set FEDSIM_DATA"):
        build(file, "data.name=mnist")
    monkeypatch.setenv("FEDSIM_DATA", "/nowhere")
    with pytest.raises(DataError, match="the data folder /nowhere does not exist"):
        build(file, "data.name=mnist")


def test_a_network_that_does_not_fit_the_data(file: Path) -> None:
    narrow = validate_tables(Config, {"model": {"name": "sme-cnn"}}, "x")
    with pytest.raises(FedsimError, match=r"sme-cnn takes images of at least 4 x 4, got inputs of shape 1 x 3 x 3"):
        registry.build("models", narrow.model.name, {}, "model").build(Task((1, 3, 3), 10))


def test_a_file_of_a_windows_editor_is_read(file: Path) -> None:
    file.write_text(TEXT, encoding="utf-8-sig")
    assert build(file).federation.clients == 4


def test_files_that_an_experiment_names_are_beside_it(file: Path) -> None:
    overrides = ["partition.name=index-file", "partition.path=who.json", "model.start=states/a.safetensors"]
    config = load_config(file, overrides)
    assert config.partition.settings["path"] == str(file.parent / "who.json")
    assert config.model.start == str(file.parent / "states" / "a.safetensors")


def test_an_attack_calls_itself_what_the_user_wrote(file: Path) -> None:
    from fedsim.base.errors import KnowledgeError
    from fedsim.federation.build_plugins import build_attacks
    from fedsim.interfaces.attack import Knowledge

    built = {table.title: attack for table, attack in build_attacks(load_config(file))}
    assert [attack.title for attack in built.values()] == ["sme", "ig"]
    with pytest.raises(KnowledgeError, match=r"^ig needs "):
        built["ig"].check_knowledge(Knowledge())
    assert built["ig"] == built["ig"].with_title("other")


@pytest.mark.parametrize("key", [".".join(["a"] * 8000), " . ".join(["'a b'"] * 8000)])
def test_a_key_of_thousands_of_parts_is_refused_at_once(tmp_path: Path, key: str) -> None:
    file, start = tmp_path / "file.toml", time.process_time()
    file.write_text(f"{key} = 1")
    with pytest.raises(ConfigError, match="is nested too deeply"):
        read_toml(file)
    assert time.process_time() - start < 1  # the parser took seven seconds
    file.write_text(f"a.b = '{'a.' * 90}'\nc = [{'0.5, ' * 300}]")
    assert set(read_toml(file)) == {"a", "c"}
