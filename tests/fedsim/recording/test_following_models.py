"""The next model tells where w_t or the replies of a recording made elsewhere are read wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.recording import following_models
from fedsim.recording.following_models import describe_misread_round
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from tests.support.recordings import build_update

COUNTS = (10, 30, 20)
Server = Callable[[Tensor, Tensor, int], Tensor]


def average(model: Tensor, mean: Tensor, number: int) -> Tensor:
    return model + mean


def run_federation(server: Server, rounds: int = 4) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return the models that the server sends, and the moves of the clients in each round."""
    rng = torch.Generator().manual_seed(0)
    models, all_moves = [torch.randn(20, generator=rng)], list[list[Tensor]]()
    for number in range(1, rounds + 1):
        common = torch.randn(20, generator=rng)
        moves = [0.1 * (common + torch.randn(20, generator=rng)) for _ in COUNTS]
        mean = sum(n * move for n, move in zip(COUNTS, moves, strict=True)) / sum(COUNTS)  # type: ignore[operator]
        models.append(server(models[-1], torch.as_tensor(mean), number))
        all_moves.append(moves)
    return models, all_moves


def describe(
    folder: Path,
    server: Server = average,
    *,
    written: Callable[[Sequence[Tensor], int], Tensor] = lambda models, number: models[number - 1],
    replies: str = "weights",
    sent: Callable[[Tensor, Tensor], Tensor] = torch.add,
) -> str:
    """Return what is said of round 2 of a recording.

    Args:
        folder: of the recording.
        server: makes the next model of the last, the mean move and the round.
        written: what is recorded as w_t, of all models and the round.
        replies: what the attack file says of replies.
        sent: what a client sends, of w_t and its move.
    """
    models, all_moves = run_federation(server)
    recorder = Recorder(folder)
    for number in range(1, 5):
        updates = list[Update]()
        for client, move in enumerate(all_moves[number - 1]):
            before, reply = {"w": written(models, number)}, {"w": sent(models[number - 1], move)}
            updates.append(build_update(before, reply, round=number, client=client, num_examples=COUNTS[client]))
        recorder.write(number, updates)
    message_format: Any = MessageFormat.model_validate({"replies": replies})
    return describe_misread_round(Transcript(folder, message_format=message_format), 2)


class Momentum:
    """Server that remembers where it went."""

    def __init__(self) -> None:
        self.velocity = torch.zeros(20)

    def __call__(self, model: Tensor, mean: Tensor, number: int) -> Tensor:
        self.velocity = mean + 0.9 * self.velocity
        return model + self.velocity


def with_noise(model: Tensor, mean: Tensor, number: int) -> Tensor:
    return model + mean + 0.3 * torch.randn(20, generator=torch.Generator().manual_seed(number))


SOUND: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "momentum": {"server": Momentum()},
    "signs": {"server": lambda model, mean, number: model + 0.1 * mean.sign()},
    "half a step": {"server": lambda model, mean, number: model + 0.5 * mean},
    "noise": {"server": with_noise},
    "a buffer": {"server": lambda model, mean, number: model + mean if number > 2 else model},
    "deltas": {"replies": "delta", "sent": lambda model, move: move},
    "gradients": {"replies": "gradient", "sent": lambda model, move: -move / 0.05},
}


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_said_of_what_a_server_does(name: str, tmp_path: Path) -> None:
    assert describe(tmp_path, **SOUND[name]) == ""


def write_rounds(folder: Path, models: Sequence[Tensor], moves: Sequence[Sequence[Tensor]]) -> Transcript:
    """Record rounds of clients that send weights."""
    recorder = Recorder(folder)
    for number, (before, round_moves) in enumerate(zip(models, moves, strict=True), 1):
        replies = enumerate(round_moves)
        recorder.write(
            number,
            [build_update({"w": before}, {"w": before + move}, round=number, client=one) for one, move in replies],
        )
    return Transcript(folder)


def test_momentum_that_overshoots_is_no_reversed_sign(tmp_path: Path) -> None:
    target, models, velocity = torch.ones(20), [torch.zeros(20)], torch.zeros(20)
    moves = list[list[Tensor]]()
    for _ in range(12):
        move = 0.3 * (target - models[-1])
        velocity = 0.9 * velocity + move
        moves.append([0.9 * move, 1.1 * move])
        models.append(models[-1] + velocity)
    transcript = write_rounds(tmp_path, models[:-1], moves)
    assert [describe_misread_round(transcript, number) for number in transcript.rounds] == [""] * 12


def test_clients_that_pull_a_converged_model_apart_are_no_late_w_t(tmp_path: Path) -> None:
    model, pull = torch.ones(20), torch.linspace(-1, 1, 20)
    transcript = write_rounds(tmp_path, [model, model + 1e-4, model + 2e-4], [[pull, 1e-4 - pull]] * 3)
    assert [describe_misread_round(transcript, number) for number in (1, 2, 3)] == [""] * 3


def test_a_robust_server_may_go_against_one_client_that_moves_far(tmp_path: Path) -> None:
    move = torch.linspace(1, 2, 20)
    models = [number * move for number in range(3)]
    transcript = write_rounds(tmp_path, models, [[move, 1.01 * move, -10 * move]] * 3)
    assert describe_misread_round(transcript, 1) == describe_misread_round(transcript, 2) == ""


def test_gradients_of_one_model_may_all_be_of_it(tmp_path: Path) -> None:
    fixed = {"written": lambda models, number: models[0], "replies": "gradient", "sent": lambda model, move: -move}
    assert describe(tmp_path, **fixed) == ""


MISREAD: dict[str, tuple[dict[str, Any], str]] = {
    "w_t after the aggregation": ({"written": lambda models, number: models[number]}, "is the mean of what clients"),
    "w_t a round old": ({"written": lambda models, number: models[max(0, number - 2)]}, "is a round old"),
    "always the first": ({"written": lambda models, number: models[0]}, "all later rounds begin with the same model"),
    "deltas as gradients": ({"replies": "gradient", "sent": lambda model, move: move}, "the opposite way"),
    "gradients as deltas": ({"replies": "delta", "sent": lambda model, move: -move / 0.05}, "the opposite way"),
    "w_t - w_T as deltas": ({"replies": "delta", "sent": lambda model, move: -move}, "the opposite way"),
}


@pytest.mark.parametrize("name", MISREAD)
def test_what_later_models_contradict_is_said(name: str, tmp_path: Path) -> None:
    settings, expected = MISREAD[name]
    assert expected in describe(tmp_path, **settings)


def test_messages_are_read_once_for_the_check_and_the_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move = torch.linspace(1, 2, 20)
    models = [number * move for number in range(3)]
    transcript = write_rounds(tmp_path, models, [[-move, -1.01 * move]] * 3)
    reason = describe_misread_round(transcript, 1)
    assert reason
    reads = list[int]()
    monkeypatch.setattr(following_models, "_read_moves", lambda _, number: reads.append(number))
    assert describe_misread_round(Transcript(transcript.folder), 1) == reason
    assert describe_misread_round(Transcript(transcript.folder), 2) == ""
    assert reads == [2]
