"""Messages are linked by what they hold, never by the ids under which they are recorded."""

import pytest
import torch

from adversaries.inference.linkability import Linkability, _sketch
from fedsim.audit.evaluation.linkages import score_links
from fedsim.base.errors import AttackError
from fedsim.base.randomness import seed_globals
from fedsim.interfaces.attack import Knowledge, Target, VictimTask
from fedsim.interfaces.findings import Linkage, client_ids
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining
from tests.support.digit_clients import DIGITS

NUM_CLIENTS = 8


def record(folder, signature=1.0, rounds=3, ids=None, controls=False):
    """Record rounds in which a delta is the same of all, plus a client's signature, plus noise.

    Args:
        signature: size of what a client's messages have in common, beside noise of size 1.
        ids: round to the ids of the clients, in their order; the same in all by default.
        controls: whether control variates are sent with the model.
    """
    generator = torch.Generator().manual_seed(5)
    of_client = torch.randn(NUM_CLIENTS, 40, generator=generator) * signature
    recorder = Recorder(folder)
    for number in range(1, rounds + 1):
        before, common = {"w": torch.randn(40, generator=generator)}, 10 * torch.randn(40, generator=generator)
        updates = []
        for client in range(NUM_CLIENTS):
            delta = common + of_client[client] + torch.randn(40, generator=generator)
            arrays = {"w": delta}
            if controls:
                before["control/w"] = torch.zeros(40)
                arrays = {"w": before["w"] + delta, "control/w": delta}
            updates.append(
                Update(
                    round=number,
                    client=(ids or {}).get(number, range(NUM_CLIENTS))[client],
                    before=before,
                    payload=Payload.from_dense(arrays, "weights" if controls else "delta"),
                    num_examples=10,
                )
            )
        recorder.write(number, updates)
    return Transcript(folder)


def target(transcript, victim=2):
    return Target(transcript=transcript, victim=victim, knowledge=Knowledge(), rng=torch.Generator())


def scores_of(finding, number):
    """Return the score of each sender's message in a round."""
    in_round = finding.rounds == number
    return dict(zip(finding.clients[in_round].tolist(), finding.scores[in_round].tolist(), strict=True))


def linked_share(transcript):
    shares = []
    for victim in range(NUM_CLIENTS):
        finding = Linkability().run(target(transcript, victim))
        is_victims = finding.clients == victim
        linked, _ = score_links(finding.scores, torch.zeros(len(is_victims)), finding.rounds, is_victims)
        shares.append(linked.value)
    return sum(shares) / len(shares)


def test_messages_with_something_in_common_are_linked(tmp_path):
    assert linked_share(record(tmp_path, signature=2.0)) > 0.9


def test_messages_with_nothing_in_common_are_linked_by_chance(tmp_path):
    assert linked_share(record(tmp_path, signature=0.0, rounds=12)) < 0.3  # 1 / 8, of 88 choices


def test_clients_are_linked_between_runs_from_other_initial_weights(tmp_path):
    """By chance one message in eight is linked."""
    recorder, plan = Recorder(tmp_path), LocalTraining(local_epochs=1, batch_size=10, learning_rate=0.1)
    for number in (1, 2):
        with seed_globals("linked runs", number):
            model = Mlp(hidden=(64,)).build(DIGITS.task)
        before, updates = copy_state(model), []
        for client in range(NUM_CLIENTS):
            rows = slice(client * 50, (client + 1) * 50)
            inputs, labels, key = DIGITS.train.inputs(rows), DIGITS.train.labels[rows], ("run", number, client)
            payload = Payload.from_dense(local_update(model, before, inputs, labels, plan, key=key)[0], "weights")
            updates.append(Update(round=number, client=client, before=before, payload=payload, num_examples=50))
        recorder.write(number, updates)
    assert linked_share(Transcript(tmp_path)) > 0.5


def test_no_score_depends_on_the_ids_in_the_recording(tmp_path):
    others = [7, 0, 3, 6, 1, 2, 4, 5]
    plain = Linkability().run(target(record(tmp_path / "plain")))
    exchanged = Linkability().run(target(record(tmp_path / "exchanged", ids={2: others, 3: others[::-1]})))
    for number, ids in ((2, others), (3, others[::-1])):
        expected = {ids[client]: score for client, score in scores_of(plain, number).items()}
        assert scores_of(exchanged, number) == pytest.approx(expected, abs=1e-6)


def test_control_variates_take_the_answer_to_remove_and_are_refused(tmp_path):
    with pytest.raises(
        AttackError, match=r"round 1: clients add control variates.*; link messages of another algorithm"
    ):
        Linkability().run(target(record(tmp_path, controls=True)))


def test_victims_at_once_have_the_findings_of_one_after_the_other(tmp_path):
    transcript = record(tmp_path)
    tasks = [VictimTask(target=target(transcript, victim)) for victim in (1, 4)]
    for task, finding in Linkability().run_several(tasks):
        alone = Linkability().run(task.target)
        assert torch.equal(finding.scores, alone.scores)
        assert torch.equal(finding.clients, alone.clients)


def test_one_round_links_nothing_and_is_refused(tmp_path):
    with pytest.raises(AttackError, match=r"took part in 1 of the 1 rounds .* needs at least 2"):
        Linkability().run(target(record(tmp_path, rounds=1)))


def test_later_messages_that_cannot_be_read_are_named_as_the_reason(tmp_path):
    transcript = record(tmp_path, rounds=1)
    broken = Payload.from_dense({"w": torch.full((40,), torch.nan)})
    update = Update(round=2, client=2, before={"w": torch.zeros(40)}, payload=broken, num_examples=10)
    Recorder(tmp_path, resume=True).write(2, [update])
    with pytest.raises(AttackError, match="client 2: no message after round 1 can be read"):
        Linkability().run(target(Transcript(transcript.folder)))


def test_a_sketch_keeps_cosines():
    generator = torch.Generator().manual_seed(0)
    first, noise = torch.randn(2, 300_000, generator=generator)
    second = 0.6 * first + 0.8 * noise
    expected = torch.cosine_similarity(first, second, 0)
    sketched = torch.cosine_similarity(_sketch({"w": first}), _sketch({"w": second}), 0)
    assert float(sketched) == pytest.approx(float(expected), abs=0.02)


def links(scores, *, rounds, sent):
    return score_links(torch.tensor(scores), torch.tensor([-1, 0] * 2), torch.tensor(rounds), torch.tensor(sent))


def test_links_are_scored_beside_chance_and_the_nearest_n():
    linked, area = links([3.0, 1.0, 1.0, 2.0], rounds=[2, 2, 3, 3], sent=[True, False, True, False])
    assert (linked.value, area.value) == (0.5, 0.625)
    assert (linked.floor, linked.floor_guess) == (0.5, "chance")  # the other's N is nearer
    linked, _ = links([3.0, 1.0, 1.0, 2.0], rounds=[2, 2, 3, 3], sent=[False, True, False, True])
    assert (linked.floor, linked.floor_guess) == (1.0, "message with the nearest N")


def test_ties_count_as_a_draw_among_them():
    linked, area = links([1.0, 1.0, 1.0, 1.0], rounds=[2, 2, 3, 3], sent=[True, False, True, False])
    assert (linked.value, area.value) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [([False] * 4, "the victim took part in no later round"), ([True] * 4, "no other client took part")],
)
def test_what_cannot_be_told_apart_has_no_score(sent, reason):
    for score in links([1.0, 2.0, 3.0, 4.0], rounds=[2, 2, 3, 3], sent=sent):
        assert reason in score.missing


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"scores": torch.tensor([float("nan"), 0.0])}, "scores that are NaN or infinite"),
        ({"rounds": torch.tensor([1, 2])}, "a message of round 1, expected rounds after 1"),
        ({"clients": client_ids([3, 3])}, "scores a message twice"),
        ({"scores": torch.tensor([1, 2])}, "expected floating point numbers in one row"),
    ],
)
def test_a_claim_that_says_nothing_is_refused(changed, sentence):
    claim = {
        "first_round": 1,
        "clients": client_ids([3, 4]),
        "rounds": torch.tensor([2, 2]),
        "scores": torch.tensor([0.1, 0.2]),
    }
    assert Linkage.from_tensors(Linkage(**claim).claim_tensors, {}).first_round == 1
    with pytest.raises(AttackError, match=sentence):
        Linkage(**(claim | changed))
