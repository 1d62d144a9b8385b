"""Guesses that differ from one another as examples of one class do.

Claims are assigned one-to-one to the true examples, so who claims k different examples of a class gains over who claims
their mean k times, without having read anything. A floor has to be such a guess: of a class with k examples, k centres
of public examples of that class. The mean of the class stays a guess of its own, for few examples have bad centres.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.evaluation.score import Public

_MOST = 1000  # public examples of a class that are looked at
_known: dict[int, dict[tuple[int | None, int], list[Tensor]]] = {}
"""By the id of public examples: the clusters of a class for so many claims, which are the same for each victim."""


def clusters_of_claims(public: Public, labels: Tensor) -> list[Tensor]:
    """Return, for each claimed label, the places of public examples whose mean is a guess of that claim.

    Args:
        public: what anybody may know of such data.
        labels: `example`, classes that are claimed; targets of a regression are all of one kind.
    """
    kinds = [None] * len(labels) if labels.is_floating_point() else labels.tolist()
    waiting = {kind: list(_clusters(public, kind, kinds.count(kind))) for kind in dict.fromkeys(kinds)}
    return [waiting[kind].pop(0) for kind in kinds]


def _clusters(public: Public, kind: int | None, count: int) -> list[Tensor]:
    """Return `count` sets of places, of public examples of a class; several may be the same."""
    if id(public.data) not in _known:
        _known[id(public.data)] = {}
        weakref.finalize(public.data, _known.pop, id(public.data))  # tensors cannot be compared as keys are
    known = _known[id(public.data)]
    if (kind, count) not in known:
        places = torch.arange(len(public.data))
        if kind is not None:
            own = places[public.labels == kind]
            places = own if len(own) else places
        known[kind, count] = _cut(public.data, places[:_MOST], count)
    return known[kind, count]


def _cut(data: Tensor, places: Tensor, count: int) -> list[Tensor]:
    """Return `count` sets of these places, by k-means; the largest are there again where there are too few."""
    number = min(count, len(places))
    if number < 2:
        return [places] * count
    from sklearn.cluster import KMeans  # which takes half a second to import
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    rows = data[places].flatten(1).double().numpy()
    with threadpool_limits(1), warnings.catch_warnings():  # the number of threads changes sums
        warnings.simplefilter("ignore", ConvergenceWarning)  # of examples that are there several times
        cluster_of = torch.from_numpy(KMeans(number, n_init=4, max_iter=50, random_state=0).fit_predict(rows))
    groups = [places[cluster_of == cluster] for cluster in range(number)]
    groups = sorted((group for group in groups if len(group)), key=len, reverse=True)
    return [groups[place % len(groups)] for place in range(count)]


def centres_of(public: Public, clusters: Sequence[Tensor]) -> Tensor:
    """Return `example ...`, the mean of each cluster."""
    return torch.stack([public.data[places].mean(0) for places in clusters])
