"""A recording made of files that another framework's server wrote holds the same numbers."""

import importlib.util
import json
import pickle
import re
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedsim.base.errors import ConfigError, TranscriptError, TrustError
from fedsim.recording.exchange_files import NAMES_KEY, import_exchange
from tests.support.commands import call_fedsim

ROOT = Path(__file__).parents[3]
BEFORE = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.tensor([0.1, -0.2])}
AFTER = {name: tensor * 1.7 + 0.3 for name, tensor in BEFORE.items()}


def write_npz(path, state):
    np.savez(path, **{name: tensor.numpy() for name, tensor in state.items()})


def write_flax(path, state):
    def pack(array):
        return msgpack.ExtType(1, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))

    nested = {"fc": {name.removeprefix("fc."): pack(tensor.numpy()) for name, tensor in state.items()}}
    path.write_bytes(msgpack.packb(nested))


WRITERS = {
    ".npz": write_npz,
    ".safetensors": lambda path, state: save_file(dict(state), path),
    ".pt": lambda path, state: torch.save(dict(state), path),
    ".msgpack": write_flax,
}


def write_round(folder, ending=".npz", clients=("3", "5"), number=1):
    """Write a round in which each of `clients` answers the same broadcast."""
    folder = folder / f"round-{number}"
    folder.mkdir(parents=True)
    WRITERS[ending](folder / f"broadcast{ending}", BEFORE)
    for client in clients:
        WRITERS[ending](folder / f"client-{client}{ending}", AFTER)
        (folder / f"client-{client}.json").write_text('{"num_examples": 20, "loss": 0.5}')
    return folder


@pytest.mark.parametrize("ending", WRITERS)
def test_arrays_arrive_bit_for_bit_from_each_format(tmp_path, ending):
    write_round(tmp_path / "exchange", ending)
    transcript = import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert transcript.rounds == [1]
    assert transcript.clients(1) == [3, 5]
    update = transcript.update(1, 5)
    for state, expected in ((update.before, BEFORE), (update.after, AFTER)):
        assert set(state) == set(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert (update.num_examples, dict(update.metrics)) == (20, {"loss": 0.5})


def test_what_the_example_writes_is_read(tmp_path):
    spec = importlib.util.spec_from_file_location("writer", ROOT / "examples/other-frameworks/exchange_writer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    writer = module.ExchangeWriter(tmp_path / "exchange")
    writer.write_broadcast(1, {name: tensor.numpy() for name, tensor in BEFORE.items()})
    writer.write_broadcast(1, {name: tensor.numpy() for name, tensor in AFTER.items()}, client=8)
    for client in (7, 8):
        writer.write_reply(1, client, {name: tensor.numpy() for name, tensor in AFTER.items()}, 4, loss=2)
    transcript = import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert list(transcript.update(1, 7).before) == list(BEFORE)
    assert transcript.update(1, 7).num_examples == 4
    assert torch.equal(transcript.update(1, 8).before["fc.bias"], AFTER["fc.bias"])


def test_facts_of_all_clients_are_those_of_the_round(tmp_path):
    folder = write_round(tmp_path / "exchange")
    (folder / "config.json").write_text('{"local_epochs": 2}')
    assert import_exchange(tmp_path / "exchange", tmp_path / "run").header(1).config == {"local_epochs": 2}


def test_clients_with_names_are_numbered_and_their_names_kept(tmp_path):
    write_round(tmp_path / "exchange", clients=("site-10", "site-2"))
    transcript = import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert transcript.clients(1) == [0, 1]
    assert json.loads(transcript.header(1).config[NAMES_KEY]) == {"0": "site-2", "1": "site-10"}


def test_a_sum_is_recorded_under_the_lowest_of_its_members(tmp_path):
    folder = write_round(tmp_path / "exchange", clients=("sum", "9"))
    (folder / "client-sum.json").write_text('{"num_examples": 60, "members": [5, 4, 11]}')
    transcript = import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert transcript.clients(1) == [4, 9]
    assert transcript.update(1, 4).members == (4, 5, 11)


class Code:
    """What a malicious client could send: unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("ending", [".npz", ".pt", ".safetensors", ".msgpack"])
def test_code_in_a_file_is_refused_and_not_run(tmp_path, ending):
    folder = write_round(tmp_path / "exchange")
    (folder / "client-3.npz").unlink()
    (folder / f"client-3{ending}").write_bytes(pickle.dumps(Code(tmp_path / "run.txt")))
    with pytest.raises(TrustError, match=r"client-3.*: is a pickle, .*; nothing in it was run"):
        import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert not (tmp_path / "run.txt").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "write", "what"),
    [
        ("client-3.pt", torch.save, "more than tensors, such as objects or code"),
        ("client-3.npz", lambda content, path: np.savez(path, w=np.array([content])), "an array of objects"),
    ],
)
def test_code_among_arrays_is_refused_and_not_run(tmp_path, name, write, what):
    folder = write_round(tmp_path / "exchange")
    (folder / "client-3.npz").unlink()
    write({"fc.weight": Code(tmp_path / "run.txt")}, folder / name)
    with pytest.raises(TrustError, match=f"^[^ ]*{name}: is refused, as it holds {what}.*; nothing in it was run"):
        import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert not (tmp_path / "run.txt").exists()


def test_an_empty_file_is_called_empty(tmp_path):
    (write_round(tmp_path / "exchange") / "client-3.npz").write_bytes(b"")
    with pytest.raises(TranscriptError, match=r"client-3.npz: is empty; write the file again"):
        import_exchange(tmp_path / "exchange", tmp_path / "run")


def test_folders_are_paths_or_text(tmp_path):
    write_round(tmp_path / "exchange")
    assert import_exchange(str(tmp_path / "exchange"), str(tmp_path / "run")).rounds == [1]


def add_stray_file(folder):
    (folder / "weights.npz").touch()


def remove_broadcast(folder):
    (folder / "broadcast.npz").unlink()


def add_second_reply(folder):
    save_file(dict(AFTER), folder / "client-3.safetensors")


def remove_replies(folder):
    for client in (3, 5):
        (folder / f"client-{client}.npz").unlink()


def add_facts_of_nobody(folder):
    (folder / "client-8.json").write_text("{}")


def write_negative_count(folder):
    (folder / "client-3.json").write_text('{"num_examples": -1}')


def write_metric_that_is_no_number(folder):
    (folder / "client-3.json").write_text('{"loss": NaN}')


def write_list(folder):
    (folder / "client-3.json").write_text("[]")


def count_rounds_from_0(folder):
    write_round(folder.parent, number=0)


def name_round_otherwise(folder):
    folder.with_name("round_2").mkdir()


def name_member_twice(folder):
    (folder / "client-3.json").write_text('{"members": [3, 4, "3"]}')


def name_members_by_fractions(folder):
    (folder / "client-3.json").write_text('{"members": [3.0, 4]}')


def write_sum_of_models(folder):
    write_npz(folder / "client-3.npz", {name: 3 * tensor + 0.01 for name, tensor in BEFORE.items()})
    (folder / "client-3.json").write_text('{"members": [3, 4, 5]}')
    (folder / "client-5.npz").unlink()
    (folder / "client-5.json").unlink()


def write_integers(folder):
    write_npz(folder / "client-3.npz", {name: (1000 * tensor).int() for name, tensor in AFTER.items()})


def write_count_of_0(folder):
    (folder / "client-3.json").write_text('{"num_examples": 0}')


def write_other_shape(folder):
    write_npz(folder / "client-3.npz", AFTER | {"fc.weight": torch.zeros(2, 4)})


def write_names_of_a_gradient(folder):
    write_npz(folder / "client-3.npz", {f"gradient/{name}": tensor for name, tensor in AFTER.items()})


def write_two_spellings(folder):
    write_npz(folder / "client-03.npz", AFTER)


@pytest.mark.parametrize(
    ("break_round", "sentence"),
    [
        (add_stray_file, r"weights.npz: is not a file of an exchange, .*; rename or remove it"),
        (remove_broadcast, r"holds no broadcast.npz, so it is not known what client 3 was sent; write w_t there"),
        (add_second_reply, r"client-3.safetensors: says the same as client-3.npz; remove one of them"),
        (remove_replies, r"holds no reply, a file client-CLIENT.npz; remove it, or add what clients sent"),
        (add_facts_of_nobody, r"holds a broadcast or facts of client 8, which sent nothing"),
        (write_negative_count, r"client-3.json: num_examples is -1, expected a whole number from 1 on"),
        (write_count_of_0, r"client-3.json: num_examples is 0, .* from 1 on; leave it out where it is not known"),
        (write_other_shape, r"client-3.npz: 'fc.weight' is 2 x 4, and 2 x 3 was sent to the client, .* not a reply"),
        (write_metric_that_is_no_number, r"client-3.json: loss is nan, expected a finite number"),
        (write_list, r"client-3.json: holds a list, expected an object"),
        (count_rounds_from_0, r"round-0: is not a round, which are round-1, round-2 and so on, counted from 1"),
        (name_round_otherwise, r"round_2: is not a round"),
        (name_member_twice, r"client-3.json: members names a client twice"),
        (name_members_by_fractions, r"client-3.json: members is \[3.0, 4\], expected names or whole numbers"),
        (write_sum_of_models, r"client-3.npz: is about 3 times what the server sent, .* write their mean"),
        (write_integers, r"client-3.npz: 'fc.weight' is of torch.int32, and real numbers were sent to the client"),
        (write_names_of_a_gradient, r"client-3.npz: 'gradient/fc.weight' is called as a message of fedsim's own"),
        (write_two_spellings, r"two names of clients are the same number \(1 and 01\)"),
    ],
)
def test_a_round_that_is_not_of_the_form_is_named(tmp_path, break_round, sentence):
    break_round(write_round(tmp_path / "exchange"))
    with pytest.raises(ConfigError, match=sentence):
        import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({}, "client-3.pt: holds no array"),
        ({"fc": "text"}, "client-3.pt: fc is a str, no array"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "holds two arrays called 'a.b'"),
        ({"fc": torch.ones(2).to(torch.float8_e4m3fn)}, "client-3.pt: fc is of torch.float8_e4m3fn"),
    ],
)
def test_what_is_no_array_is_named(tmp_path, state, sentence):
    folder = write_round(tmp_path / "exchange")
    (folder / "client-3.npz").unlink()
    torch.save(state, folder / "client-3.pt")
    with pytest.raises(TranscriptError, match=sentence):
        import_exchange(tmp_path / "exchange", tmp_path / "run")


def test_a_later_round_that_cannot_be_read_leaves_no_half_recording(tmp_path):
    write_round(tmp_path / "exchange", number=1)
    (write_round(tmp_path / "exchange", number=2) / "client-5.npz").write_bytes(b"PK damaged")
    with pytest.raises(TranscriptError, match=r"round-2/client-5.npz: holds no arrays that can be read"):
        import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_with_content_is_left_alone(tmp_path):
    write_round(tmp_path / "exchange")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; name a run folder that is to be made"):
        import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_file_in_place_of_the_run_folder_is_left_alone(tmp_path):
    write_round(tmp_path / "exchange")
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match="run: is not a folder; name a run folder that is to be made"):
        import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


def test_a_folder_without_rounds_is_named(tmp_path):
    with pytest.raises(ConfigError, match="holds no folder round-1"):
        import_exchange(tmp_path, tmp_path / "run")
    with pytest.raises(ConfigError, match="is not a folder"):
        import_exchange(tmp_path / "nowhere", tmp_path / "run")


def test_a_reply_with_nan_is_imported_and_said_to_have_it(tmp_path, caplog):
    folder = write_round(tmp_path / "exchange")
    write_npz(folder / "client-3.npz", {name: tensor * torch.nan for name, tensor in AFTER.items()})
    transcript = import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert transcript.update(1, 3).after["fc.bias"].isnan().all()
    assert [record.message for record in caplog.records] == [
        f"{folder / 'client-3.npz'}: 'fc.weight' and 1 more hold NaN or infinite values, which no attack can use"
    ]


def test_the_command_says_what_it_wrote_and_what_is_missing(tmp_path, capfd):
    folder = write_round(tmp_path / "exchange")
    (folder / "client-5.json").unlink()
    done = call_fedsim("import", tmp_path / "exchange", tmp_path / "run", capfd=capfd)
    assert done.returncode == 0
    assert "2 updates in 1 round written" in done.stdout
    assert "1 of them without N, which an attack file states as [app] num_examples" in done.stdout
    shown = call_fedsim("inspect", tmp_path / "run", "--rows", capfd=capfd).stdout
    assert "intact: 2 updates of 1 round" in shown
    assert "20 to 20, 20 on average; not known of 1 update" in shown
    assert re.search(r"│ 1 +│ 5 +│ - +│", shown)
    again = call_fedsim("import", tmp_path / "exchange", tmp_path / "run", capfd=capfd)
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_names_that_are_numbers_stay_beside_others(tmp_path):
    write_round(tmp_path / "exchange", clients=("2", "10", "site-a"))
    transcript = import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert transcript.clients(1) == [2, 10, 11]
    assert json.loads(transcript.header(1).config[NAMES_KEY])["11"] == "site-a"


def test_a_sum_over_one_client_is_its_own_message(tmp_path):
    folder = write_round(tmp_path / "exchange")
    (folder / "client-3.json").write_text('{"num_examples": 60, "members": [3]}')
    assert import_exchange(tmp_path / "exchange", tmp_path / "run").update(1, 3).members == ()


def test_two_sums_that_begin_with_the_same_client_are_named(tmp_path):
    folder = write_round(tmp_path / "exchange", clients=("a", "b"))
    (folder / "client-a.json").write_text('{"members": [3, 4]}')
    (folder / "client-b.json").write_text('{"members": [3, 5]}')
    with pytest.raises(ConfigError, match="client-a and client-b both are or begin with client 3"):
        import_exchange(tmp_path / "exchange", tmp_path / "run")


def test_a_broadcast_that_is_the_mean_of_its_replies_is_warned_of(tmp_path, caplog):
    folder = write_round(tmp_path / "exchange")
    others = {name: 2 * BEFORE[name] - tensor for name, tensor in AFTER.items()}
    write_npz(folder / "client-3.npz", others)
    import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert "round-1: the broadcast is the mean of what clients answered to it" in caplog.text


def test_weights_beside_deltas_are_warned_of(tmp_path, caplog):
    write_round(tmp_path / "exchange")
    folder = write_round(tmp_path / "exchange", number=2)
    assert "looks like" not in caplog.text
    turned = torch.tensor([[0.1, 0.0, 0.0], [0.0, 0.0, -0.05]])
    write_npz(folder / "client-5.npz", {"fc.weight": turned, "fc.bias": torch.zeros(2)})
    import_exchange(tmp_path / "exchange", tmp_path / "run")
    assert "round-2/client-5.npz: looks like a delta or a gradient" in caplog.text
    assert "round-1/client-3.npz like weights" in caplog.text


def test_a_round_that_is_not_recorded_is_named(tmp_path):
    write_round(tmp_path / "exchange")
    transcript = import_exchange(tmp_path / "exchange", tmp_path / "run")
    for read in (lambda: transcript.update(9, 3), lambda: transcript.header(0), lambda: transcript.sha256(9)):
        with pytest.raises(TranscriptError, match=r"round [09] is not recorded; recorded: 1"):
            read()
