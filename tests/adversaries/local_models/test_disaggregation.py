"""Updates of single clients out of sums over groups: exact where they are constant, and near in a real federation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from adversaries.local_models.disaggregation import Disaggregation
from fedsim.base.errors import AttackError
from fedsim.interfaces.attack import Knowledge, Target
from fedsim.interfaces.findings import LocalModel
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update
from tests.support.experiments import make_tiny_config, run_serial

CLIENTS, COUNTS = 6, [5, 20, 11, 7, 30, 2]


def moves_of(client: int, size: int = 8) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(client), dtype=torch.float64)


def broadcast(number: int, size: int = 8) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 + number))


def record(
    folder: Path,
    groups: Sequence[Sequence[Sequence[int]]],
    *,
    noise: float = 0.0,
    kind: str = "delta",
    counts: Callable[[int, int], int] = lambda client, number: COUNTS[client],
) -> Transcript:
    """By round, groups of clients, each of which moves the model by `moves_of`."""
    recorder = Recorder(folder)
    for number, of_round in enumerate(groups, 1):
        rng = torch.Generator().manual_seed(number)
        before: State = {"weight": broadcast(number)[:6].reshape(2, 3), "bias": broadcast(number)[6:]}
        updates = []
        for members in of_round:
            total = sum(counts(client, number) for client in members)
            parts = [
                counts(client, number) * (moves_of(client) + noise * torch.randn(8, generator=rng, dtype=torch.float64))
                for client in members
            ]
            mean = (torch.stack(parts).sum(0) / total).float()
            sent = {"weight": mean[:6].reshape(2, 3), "bias": mean[6:]}
            if kind == "weights":
                sent = {name: before[name] + tensor for name, tensor in sent.items()}
            updates.append(
                Update(
                    round=number,
                    client=min(members),
                    before=before,
                    payload=Payload.from_dense(sent, kind),  # type: ignore[arg-type]
                    num_examples=total,
                    members=tuple(sorted(members)) if len(members) > 1 else (),
                )
            )
        recorder.write(number, updates)
    return Transcript(folder)


def drawn(rounds: int, size: int, clients: int = CLIENTS) -> list[list[list[int]]]:
    rng = np.random.default_rng(4)
    orders = [rng.permutation(clients).tolist() for _ in range(rounds)]
    return [[order[place : place + size] for place in range(0, clients, size)] for order in orders]


def find_model(transcript: Transcript, victim: int) -> LocalModel:
    finding = Disaggregation().run(
        Target(transcript=transcript, victim=victim, knowledge=Knowledge(), rng=torch.Generator())
    )
    assert isinstance(finding, LocalModel)
    return finding


def flat(state: State) -> Tensor:
    return torch.cat([state["weight"].flatten(), state["bias"]]).double()


def last_round(transcript: Transcript, client: int) -> int:
    return max(number for number in transcript.rounds if transcript.header(number).find_reply(client))


@pytest.mark.parametrize("kind", ["delta", pytest.param("weights", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("size", [2, 3])
def test_constant_updates_are_found_exactly_though_only_totals_are_known(size: int, kind: str, tmp_path: Path) -> None:
    transcript = record(tmp_path, drawn(16, size), kind=kind)
    for client in range(CLIENTS):
        finding = find_model(transcript, client)
        expected = broadcast(last_round(transcript, client)).double() + moves_of(client)
        assert torch.allclose(flat(finding.state), expected, atol=1e-4)
        assert list(finding.state) == ["weight", "bias"]
        assert finding.state["weight"].dtype == torch.float32
        assert float(finding.trace["residual"]) < 1e-5
        assert float(finding.trace["standard_error"]) < 1e-4


def test_one_sampled_group_a_round_suffices(tmp_path: Path) -> None:
    """The setting of the paper: in each round the server sees the sum over those that were sampled."""
    rng = np.random.default_rng(1)
    groups = [[sorted(rng.choice(CLIENTS, 3, replace=False).tolist())] for _ in range(12)]
    transcript = record(tmp_path, groups)
    for client in range(CLIENTS):
        expected = broadcast(last_round(transcript, client)).double() + moves_of(client)
        assert torch.allclose(flat(find_model(transcript, client).state), expected, atol=1e-4)


def test_a_client_that_is_seen_alone_is_a_group_of_one(tmp_path: Path) -> None:
    transcript = record(tmp_path, [[[client] for client in range(CLIENTS)]] * 2)
    for client in range(CLIENTS):
        assert torch.allclose(
            flat(find_model(transcript, client).state), broadcast(2).double() + moves_of(client), atol=1e-5
        )


def test_who_cannot_be_told_apart_is_said(tmp_path: Path) -> None:
    """Clients 0 and 1 are always together; all others are told apart, though the matrix has not full rank."""
    groups = [[[0, 1, 2], [3, 4, 5]], [[0, 1, 3], [2, 4, 5]], [[0, 1, 4], [2, 3, 5]], [[0, 1, 5], [2, 3, 4]]]
    groups += [[[0, 1], [2, 3], [4, 5]]]
    transcript = record(tmp_path, groups)
    expected = (
        "client 1: its update does not follow from the sums: 11 sums over 6 clients have rank 5; clients 0, 1 are "
        "always in the same groups; inspect more rounds, in which other clients are together"
    )
    with pytest.raises(AttackError, match=expected):
        find_model(transcript, 1)
    for client in range(2, CLIENTS):
        assert torch.allclose(
            flat(find_model(transcript, client).state), broadcast(5).double() + moves_of(client), atol=1e-4
        )


def test_too_few_rounds_are_said(tmp_path: Path) -> None:
    transcript = record(tmp_path, drawn(1, 3))
    with pytest.raises(
        AttackError, match=r"2 sums over 6 clients have rank 2; clients .* are always in the same groups"
    ):
        find_model(transcript, 0)
    ring = [[[0, 1]], [[1, 2]], [[2, 3]], [[3, 0]]]  # no two are always together, but one direction is missing
    transcript = record(tmp_path / "ring", ring)
    with pytest.raises(AttackError, match="4 sums over 4 clients have rank 3; inspect more rounds"):
        find_model(transcript, 0)


def test_residual_and_standard_error_of_two_messages_are_those_by_hand(tmp_path: Path) -> None:
    """The mean m of two updates leaves half their difference of each, and has a standard error of as much."""
    transcript = record(tmp_path, [[[0]], [[0]]], noise=0.5)
    one, other = (-flat(transcript.update(number, 0).pseudo_gradient) for number in (1, 2))
    finding, half, mean = find_model(transcript, 0), (one - other) / 2, (one + other) / 2
    both = torch.cat([one, other])
    assert float(finding.trace["residual"]) == pytest.approx(float(2**0.5 * half.norm() / both.norm()), rel=1e-5)
    assert float(finding.trace["standard_error"]) == pytest.approx(float(half.norm() / mean.norm()), rel=1e-5)


@pytest.mark.thorough
def test_noise_is_told_by_the_residual_and_averaged_over_rounds(tmp_path: Path) -> None:
    errors, told = [], []
    for rounds in (10, 200):
        transcript = record(tmp_path / str(rounds), drawn(rounds, 2), noise=0.5)
        finding = find_model(transcript, 4)
        missed = flat(finding.state) - broadcast(rounds).double() - moves_of(4)
        errors.append(float(missed.norm() / moves_of(4).norm()))
        told.append(float(finding.trace["standard_error"]))
        assert float(finding.trace["residual"]) > 0.1
    assert errors[1] < 0.5 * errors[0]
    assert all(error < 2.5 * said for error, said in zip(errors, told, strict=True))
    assert all(said < 5 * error for error, said in zip(errors, told, strict=True))


def test_as_many_sums_as_clients_say_nothing_of_their_own_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transcript = record(tmp_path, [[[0, 1]], [[1, 2]], [[0, 2]]], noise=0.5)
    with caplog.at_level(logging.WARNING):
        finding = find_model(transcript, 1)
    assert float(finding.trace["residual"]) < 1e-6
    assert "standard_error" not in finding.trace
    assert "3 sums determine as many unknowns, so it is unknown whether updates were constant" in caplog.text


def test_counts_that_change_beyond_sense_are_refused(tmp_path: Path) -> None:
    def counts(client: int, number: int) -> int:
        return 1 if (client, number) == (0, 2) else 400 if client == 1 and number == 1 else 5

    transcript = record(tmp_path, [[[0, 1]], [[0, 2], [1, 3]], [[2, 3]]], counts=counts)
    groups = [[[0, 1]], [[0, 2]], [[1, 2]]]
    with pytest.raises(AttackError, match=r"client 2: by the totals it has -\d+ examples, so N of clients changes"):
        find_model(record(tmp_path / "other", groups, counts=counts), 2)
    assert transcript.rounds == [1, 2, 3]


def test_who_never_took_part_is_said(tmp_path: Path) -> None:
    with pytest.raises(AttackError, match="client 17: took part in none of the 2 rounds to be attacked; choose"):
        find_model(record(tmp_path, drawn(2, 3)), 17)


def test_gradients_are_no_models(tmp_path: Path) -> None:
    transcript = record(tmp_path, drawn(2, 3), kind="gradient")
    with pytest.raises(AttackError, match="it sent a gradient, from which no local model is learnt this way"):
        find_model(transcript, 0)


@pytest.mark.thorough
def test_in_a_real_federation_it_is_nearer_to_the_client_than_any_model_that_was_sent(tmp_path: Path) -> None:
    """Clients with their own classes, near the end of training, where their updates hardly change any more."""
    tables = {
        "federation": {"clients": 8, "rounds": 30, "evaluate_every": 0},
        "partition": {"name": "dirichlet", "alpha": 0.2, "samples_per_client": 60},
        "training": {"local_epochs": 3, "batch_size": 20, "learning_rate": 0.05},
    }
    plain = Transcript(run_serial(make_tiny_config(**tables), tmp_path / "plain").path)
    folder = run_serial(make_tiny_config(**tables, secure_aggregation={"groups": 2}), tmp_path / "secure")
    sums = Transcript(folder.path).restrict_to(range(12, 31))

    def all_of(state: State) -> Tensor:
        return torch.cat([tensor.flatten().double() for tensor in state.values()])

    for client in range(8):
        own = plain.update(30, client)
        moved = all_of(own.after) - all_of(own.before)
        reply = sums.header(30).find_reply(client)
        assert reply is not None
        group = sums.update(30, reply.client)
        start = all_of(group.before)
        missed = (all_of(find_model(sums, client).state) - start - moved).norm() / moved.norm()
        of_group = (all_of(group.after) - start - moved).norm() / moved.norm()
        assert missed < 0.5  # of the global model it is 1
        assert missed < max(of_group, torch.tensor(0.35))
