"""An attack that reads nothing does not leak, however diverse its claims are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.statistics import is_more_than_half
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.files import cache_folder
from fedsim.base.randomness import generator
from fedsim.data.digits import Digits
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.modality import PublicExamples
from fedsim.modalities import diverse_guesses
from fedsim.modalities.diverse_guesses import centres_of_claims, clusters_of_claims
from fedsim.modalities.guesses import class_means

VICTIMS = 12


def centres_for(labels: Tensor, public: PublicExamples, seed: int) -> Tensor:
    """Claim k-means centres of public examples, as many of each class as there are labels; no message is read."""
    claims = []
    for label in labels.unique().tolist():
        count, own = int((labels == label).sum()), public.data[public.labels == label]
        rows = own.flatten(1).double().numpy()
        centres = KMeans(min(count, len(own)), n_init=3, random_state=seed).fit(rows).cluster_centers_
        claims.append(torch.from_numpy(np.resize(centres, (count, rows.shape[1]))))
    return torch.cat(claims).float().clamp(0, 1).reshape(-1, *public.data.shape[1:])


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.thorough)])
def test_centres_of_public_digits_do_not_leak(count: int) -> None:
    digits = Digits().load(None).train
    draw = generator("floors", count)
    data, labels = digits.inputs(), digits.labels
    order = torch.randperm(len(data), generator=draw)
    public = PublicExamples(data=data[order[:600]], labels=labels[order[:600]])
    ahead = {"psnr": 0, "ssim": 0}
    for victim in range(VICTIMS):
        own = order[600:][torch.randint(len(order) - 600, (count,), generator=draw)]
        truth = Truth(data=data[own], labels=labels[own])
        known = truth.labels.sort().values
        finding = Reconstruction(data=centres_for(known, public, victim), labels=known)
        scores = {
            item.metric: item
            for item in score_examples(finding, truth, public=public, rng=generator(victim), labels_granted=True)
        }
        for metric in ahead:
            ahead[metric] += scores[metric].value > scores[metric].floor
    assert not any(is_more_than_half(number, VICTIMS) for number in ahead.values()), ahead


def test_each_claim_has_a_cluster_of_its_class() -> None:
    data = torch.tensor([[0.0], [0.1], [0.9], [1.0], [0.5]])
    public = PublicExamples(data=data, labels=torch.tensor([0, 0, 0, 0, 1]))
    clusters = clusters_of_claims(public, torch.tensor([0, 1, 0, 1]))
    assert sorted(sorted(places.tolist()) for places in clusters) == [[0, 1], [2, 3], [4], [4]]


def test_equal_examples_are_clustered_once_for_each_number_of_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one experiment, such as the cells of a sweep, have equal public examples in other tensors."""
    calls: list[int] = []
    number_clusters = diverse_guesses._number_clusters

    def count_call(rows: Any, number: int) -> Tensor:
        calls.append(number)
        return number_clusters(rows, number)

    monkeypatch.setattr(diverse_guesses, "_number_clusters", count_call)
    data = torch.rand(12, 2, generator=torch.Generator().manual_seed(20261127))

    def cluster(data: Tensor, claims: int) -> list[list[int]]:
        public = PublicExamples(data=data, labels=torch.zeros(12).long())
        return [indices.tolist() for indices in clusters_of_claims(public, torch.zeros(claims).long())]

    assert cluster(data, 2) == cluster(data.clone(), 2)
    assert len(cluster(data, 3)) == 3
    cluster(data.flip(0), 2)
    assert calls == [2, 3, 2]
    # Another process, such as that of a report, finds them in the cache; a damaged file is computed again.
    expected = cluster(data, 2), cluster(data, 3)
    for damage in (None, b"no tensors", b""):
        monkeypatch.setattr(diverse_guesses, "_cluster_numbers", {})
        if damage is not None:
            for path in (cache_folder() / "clusters").iterdir():
                path.write_bytes(damage)
        assert (cluster(data.clone(), 2), cluster(data.clone(), 3)) == expected
        assert calls == [2, 3, 2] if damage is None else calls[-2:] == [2, 3]
    assert len(calls) == 7


def test_public_examples_under_other_labels_have_clusters_and_means_of_their_own() -> None:
    """Masks and rows of labels are judged with the same public examples under other classes."""
    data, claimed = torch.tensor([[0.0], [0.2], [0.8], [1.0]]), torch.tensor([0, 0])
    first = PublicExamples(data=data, labels=torch.tensor([0, 0, 1, 1]))
    other = PublicExamples(data=data, labels=torch.tensor([1, 1, 0, 0]))
    assert sorted(centres_of_claims(first, claimed).flatten().tolist()) == pytest.approx([0.0, 0.2])
    assert sorted(centres_of_claims(other, claimed).flatten().tolist()) == pytest.approx([0.8, 1.0])
    assert class_means(first, claimed, 3).flatten().tolist() == pytest.approx([0.1, 0.1, 0.5])
    assert class_means(other, claimed, 3).flatten().tolist() == pytest.approx([0.9, 0.9, 0.5])
