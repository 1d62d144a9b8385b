"""Others than the server see the sum of what all but themselves sent, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.base.errors import ConfigError, TranscriptError
from fedsim.recording.adversary_role import AdversaryRole, Who
from fedsim.recording.observed_transcript import FinalModel, ObservedTranscript
from fedsim.recording.payloads import Dense, Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update

EXAMPLES = {2: 10, 3: 30, 5: 60}
"""Client to N."""


def draw_state(seed: int) -> dict[str, Tensor]:
    """A state with a counter, as BatchNorm has one."""
    rng = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(4, 3, generator=rng), "count": torch.tensor(seed)}


def average(states: Mapping[int, State]) -> dict[str, Tensor]:
    """What FedAvg makes of these replies."""
    total = sum(EXAMPLES[client] for client in states)
    weighted = [EXAMPLES[client] * state["w"].double() for client, state in states.items()]
    return {"w": (torch.stack(weighted).sum(0) / total).float(), "count": torch.tensor(9)}


def record_rounds(
    folder: Path,
    rounds: Sequence[Sequence[int]],
    failures: Mapping[int, Sequence[int]] | None = None,
    **fields: Any,
) -> tuple[Transcript, dict[Any, Any]]:
    """A federation of FedAvg, with the clients of each round, and those that fail; also what each sent, by round."""
    recorder, model = Recorder(folder), draw_state(0)
    sent: dict[Any, Any] = {}
    for number, clients in enumerate(rounds, 1):
        sent[number] = {client: draw_state(10 * number + client) for client in clients}
        updates = []
        for client, state in sent[number].items():
            payload = Payload.from_dense(state, "weights")
            updates.append(
                Update(
                    round=number,
                    client=client,
                    before=model,
                    payload=payload,
                    num_examples=EXAMPLES[client],
                    metrics={"loss": 1.5},
                    **fields,
                )
            )
        failed = dict.fromkeys((failures or {}).get(number, ()), "straggler")
        recorder.write(number, updates, failed, config={"learning-rate": 0.5})
        model = average(sent[number]) if clients else model
    sent["final"] = model
    return Transcript(folder), sent


def observe(transcript: Transcript, sent: Mapping[Any, Any], who: Who) -> ObservedTranscript:
    """What `who` sees, where the model after the last round is at hand."""
    return ObservedTranscript(
        transcript, AdversaryRole.parse(who), FinalModel(transcript.rounds[-1], sent["final"], "0" * 64)
    )


@pytest.mark.parametrize(("who", "rest"), [("outsider", (2, 3, 5)), ([2], (3, 5)), ([2, 3], (5,)), ([3, 5], (2,))])
def test_the_models_show_the_sum_of_all_others(tmp_path: Path, who: Who, rest: tuple[int, ...]) -> None:
    transcript, sent = record_rounds(tmp_path, [(2, 3, 5), (2, 3, 5)])
    observed = observe(transcript, sent, who)
    assert observed.rounds == [1, 2]
    for number in observed.rounds:
        [reply] = observed.header(number).replies
        assert tuple(reply.senders) == rest
        assert reply.members == (rest if len(rest) > 1 else ())
        assert reply.num_examples == sum(EXAMPLES[client] for client in rest)
        assert not reply.metrics
        update = observed.update(number, reply.client)
        expected = average({client: sent[number][client] for client in rest})
        assert torch.allclose(update.after["w"], expected["w"], atol=1e-5)
        assert update.after["count"] == 9
        observed.check_mean(number)


def test_a_client_sees_the_rounds_of_which_it_gets_both_models(tmp_path: Path) -> None:
    transcript, sent = record_rounds(tmp_path, [(2, 3), (2, 5), (3, 5), (2, 3)])
    assert observe(transcript, sent, [2]).rounds == [1, 4]
    assert observe(transcript, sent, [2, 5]).rounds == [1, 3, 4]  # of round 2 nobody else is left
    assert observe(transcript, sent, "outsider").rounds == [1, 2, 3, 4]
    without_final = ObservedTranscript(transcript, AdversaryRole.parse([2]), None)
    assert without_final.rounds == [1]
    with pytest.raises(TranscriptError, match="none of these clients is sent the model after it"):
        observe(transcript, sent, [2]).update(2, 5)


def test_an_eavesdropper_on_a_link_gets_the_models_that_pass_it(tmp_path: Path) -> None:
    transcript, sent = record_rounds(tmp_path, [(2, 3), (2, 5), (3, 5), (2, 3)])
    observed = observe(transcript, sent, ["eavesdropper", 2])
    assert observed.rounds == [1]
    assert observed.header(1).replies[0].members == (2, 3)  # nothing is subtracted: uploads are masked
    # No round sends the model after the last one.
    assert observe(transcript, sent, "eavesdropper").rounds == [1, 2, 3]


def test_a_client_that_fails_was_sent_the_model_all_the_same(tmp_path: Path) -> None:
    transcript, sent = record_rounds(tmp_path / "a", [(2, 3), (3, 5), (3, 5), (3, 5)], failures={2: [2], 3: [2]})
    observed = observe(transcript, sent, [2])
    assert observed.rounds == [1, 2]  # both models of these; it is not asked for the last one
    assert [tuple(observed.header(number).replies[0].senders) for number in (1, 2)] == [(3,), (3, 5)]
    observed.check_mean(2)


def test_a_round_that_nobody_answers_holds_no_model(tmp_path: Path) -> None:
    transcript, sent = record_rounds(tmp_path, [(2, 3), ()], failures={2: [2, 3]})
    with pytest.raises(ConfigError, match="round 1: the model after it is not recorded, since nobody answered it"):
        observe(transcript, sent, "outsider")


def test_gradients_are_read_from_the_step_of_the_server(tmp_path: Path) -> None:
    before, buffer = draw_state(0), torch.ones(3)
    gradients = {client: draw_state(client)["w"] for client in EXAMPLES}
    updates = []
    for client, gradient in gradients.items():
        payload = Payload({"w": ("gradient", Dense(gradient)), "mean": ("weights", Dense(buffer * client))})
        state = {"w": before["w"], "mean": buffer}
        updates.append(Update(round=1, client=client, before=state, payload=payload, num_examples=EXAMPLES[client]))
    Recorder(tmp_path).write(1, updates, config={"learning-rate": 0.5})
    step = average({client: {"w": gradient} for client, gradient in gradients.items()})["w"]
    mean = sum(EXAMPLES[client] * client for client in EXAMPLES) / sum(EXAMPLES.values())
    final = FinalModel(1, {"w": before["w"] - 0.5 * step, "mean": buffer * mean}, "0" * 64)
    observed = ObservedTranscript(Transcript(tmp_path), AdversaryRole.parse([2]), final)
    observed.check_mean(1)
    update = observed.update(1, 3)
    assert update.gradient is not None
    expected = average({client: {"w": gradients[client]} for client in (3, 5)})["w"]
    assert list(update.gradient) == ["w"]
    assert torch.allclose(update.gradient["w"], expected, atol=1e-5)
    assert torch.allclose(update.after["mean"], buffer * (30 * 3 + 60 * 5) / 90)


def test_a_server_that_does_not_average_is_found_by_what_it_did(tmp_path: Path) -> None:
    transcript, sent = record_rounds(tmp_path, [(2, 3, 5)])
    sent["final"]["w"] += 0.01
    with pytest.raises(ConfigError, match="the model after round 1 is not the mean of its replies"):
        observe(transcript, sent, [2]).check_mean(1)


def test_roundings_of_the_model_are_not_taken_for_another_server(tmp_path: Path) -> None:
    """Small updates, and one client that is left of many examples: rounding is a tenth of what it sent."""
    weights = {"w": draw_state(0)["w"]}
    updates, moves = [], {2: 1e-5, 3: 2e-5, 5: 3e-5}
    counts = {2: 1, 3: 1000, 5: 1000}
    for client, move in moves.items():
        payload = Payload.from_dense({"w": weights["w"] + move}, "weights")
        updates.append(Update(round=1, client=client, before=weights, payload=payload, num_examples=counts[client]))
    Recorder(tmp_path).write(1, updates)
    sums = sum(counts[update.client] * update.after["w"].double() for update in updates)
    mean = torch.as_tensor(sums / 2001).float()
    observed = ObservedTranscript(
        Transcript(tmp_path), AdversaryRole.parse([3, 5]), FinalModel(1, {"w": mean}, "0" * 64)
    )
    true_move = observed._recording.recorded_update(1, 2).after["w"] - weights["w"]
    seen_move = observed.update(1, 2).after["w"] - weights["w"]
    assert (seen_move - true_move).norm() > 0.1 * true_move.norm()
    observed.check_mean(1)
    # Ten times the update is more than roundings leave.
    wrong = FinalModel(1, {"w": weights["w"] + 10 * (mean - weights["w"])}, "0" * 64)
    with pytest.raises(ConfigError, match="is not the mean of its replies"):
        ObservedTranscript(Transcript(tmp_path), AdversaryRole("outsider"), wrong).check_mean(1)


def test_a_copy_for_attacks_holds_no_update_of_a_single_client(tmp_path: Path) -> None:
    transcript, sent = record_rounds(tmp_path / "all", [(2, 3, 5), (2, 3, 5)])
    observed = observe(transcript, sent, [2]).restrict_to([1])
    assert observed.rounds == [1]
    assert not observed.header(1).config
    observed.copy_to(tmp_path / "copy")
    copied = Transcript(tmp_path / "copy")
    assert [tuple(update.members) for update in copied.updates()] == [(3, 5)]
    assert torch.equal(copied.update(1, 3).after["w"], observed.update(1, 3).after["w"])


def test_a_copy_for_who_hears_a_link_holds_its_messages_alone(tmp_path: Path) -> None:
    transcript, sent = record_rounds(tmp_path / "all", [(2, 3), (3, 5)], failures={1: [5], 2: [2]})
    heard = transcript.restrict_to_links([2]).restrict_to([1, 2])
    heard.copy_to(tmp_path / "copy")
    copied = Transcript(tmp_path / "copy")
    for seen in (heard, copied):
        assert [seen.clients(number) for number in seen.rounds] == [[2], []]
        assert [list(seen.header(number).failures) for number in seen.rounds] == [[], [2]]
        assert torch.equal(seen.update(1, 2).after["w"], sent[1][2]["w"])


def test_what_is_seen_follows_from_its_sources(tmp_path: Path) -> None:
    transcript, sent = record_rounds(tmp_path, [(2, 3, 5), (2, 3, 5)])
    first, second = observe(transcript, sent, [2]), observe(transcript, sent, [2])
    assert first.sha256(1) == second.sha256(1)
    assert len({first.sha256(1), first.sha256(2), observe(transcript, sent, [3]).sha256(1)}) == 3


@pytest.mark.parametrize(
    ("rounds", "fields", "who", "reason"),
    [
        ([(2, 3)], {}, [5], "none of these clients takes part"),
        ([(2, 3)], {}, [2, 3], "nobody else takes part"),
        ([(2, 3)], {"members": (2, 3)}, [3], "set who = 'outsider'"),
    ],
)
def test_a_recording_that_shows_nothing_is_refused(
    tmp_path: Path, rounds: Sequence[Sequence[int]], fields: Mapping[str, Any], who: Who, reason: str
) -> None:
    transcript, sent = record_rounds(tmp_path, rounds, **fields)
    with pytest.raises(ConfigError, match=reason):
        observe(transcript, sent, who)


def test_control_variates_are_not_taken_for_a_model(tmp_path: Path) -> None:
    state = draw_state(0) | {"control/w": torch.zeros(4, 3)}
    payload = Payload.from_dense(state, "weights")
    Recorder(tmp_path).write(1, [Update(round=1, client=2, before=state, payload=payload, num_examples=1)])
    with pytest.raises(ConfigError, match="control variates"):
        ObservedTranscript(Transcript(tmp_path), AdversaryRole("outsider"), FinalModel(1, state, "0" * 64))


def test_where_all_clients_count_alike_the_sum_is_divided_by_those_who_sent(tmp_path: Path) -> None:
    transcript, sent = record_rounds(tmp_path, [(2, 3)])
    before = transcript.update(1, 2).before["w"]
    moves = [state["w"] - before for state in sent[1].values()]
    final = FinalModel(1, {"w": before + sum(moves) / 4, "count": torch.tensor(9)}, "0" * 64)
    observed = ObservedTranscript(transcript, AdversaryRole("outsider"), final, equal_clients=4)
    assert torch.allclose(observed.update(1, 2).after["w"], before + sum(moves) / 2, atol=1e-5)
