"""Guesses that differ from one another as examples of one class do.

Claims are assigned one-to-one to the true examples, so claiming k different examples of a class
gains over claiming their mean k times, even without reading any update. A floor must include such a
guess: for a class with k examples, k centres of public examples of that class. The class mean stays
a guess of its own, because few examples have bad centres.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedsim.base.content_hashes import hash_json
from fedsim.base.files import cache_folder, replace_atomically
from fedsim.interfaces.modality import PublicExamples

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from threadpoolctl import ThreadpoolController

ValueT = TypeVar("ValueT")
_MAX_EXAMPLES = 1000
"""Most public examples of a class that are clustered."""
_shared_by_data: dict[int, list[tuple[Tensor, dict[Hashable, Any]]]] = {}
"""What guesses about each victim share, by the id of the public examples; each with their labels."""
_MAX_CLUSTERINGS = 1000
_cluster_numbers: dict[tuple[str, tuple[int, ...], int], Tensor] = {}
"""Number of the cluster of each row, by hash and shape of the rows and number of clusters."""
_K_MEANS = {"n_init": 4, "max_iter": 50, "random_state": 0}
_CLUSTERS = "clusters"
"""Name of such numbers in a file of the cache."""


def clusters_of_claims(public: PublicExamples, labels: Tensor) -> list[Tensor]:
    """Return, for each claimed label, the indices of public examples whose mean is a guess of it.

    Args:
        public: examples of the same kind of data.
        labels: `example`, claimed classes; targets of a regression count as one class.
    """
    return _in_order_of_claims(public, labels, _class_clusters)


def centres_of_claims(public: PublicExamples, labels: Tensor) -> Tensor:
    """Return `example ...`, the mean of the public examples of each of `clusters_of_claims`."""
    return _summarize_clusters(public, labels, "centres", lambda examples: examples.mean(0))


def medians_of_claims(public: PublicExamples, labels: Tensor) -> Tensor:
    """Return `example ...`, the median of each value over the public examples of each of `clusters_of_claims`.

    Where most examples of a class are black, so is it, while a mean is grey: by SSIM it is the better guess of a digit.
    """
    return _summarize_clusters(public, labels, "medians", lambda examples: examples.median(0).values)


def share_by_public(public: PublicExamples, key: Hashable, compute: Callable[[], ValueT]) -> ValueT:
    """Return what `compute` made of the same public examples and labels, or call it; guesses about victims share it.

    Args:
        public: examples and their labels, which nobody changes in place.
        key: all else that it depends on; a name of it first.
        compute: makes it; nobody may change what it returns.
    """
    data = id(public.data)  # tensors cannot be keys
    if data not in _shared_by_data:
        _shared_by_data[data] = []
        weakref.finalize(public.data, _shared_by_data.pop, data)
    entries = _shared_by_data[data]
    values = next((values for labels, values in entries if _are_equal(labels, public.labels)), None)
    if values is None:
        values = {}
        entries.append((public.labels, values))
    if key not in values:
        values[key] = compute()
    value: ValueT = values[key]
    return value


def _are_equal(labels: Tensor, others: Tensor) -> bool:
    return labels is others or (labels.dtype == others.dtype and torch.equal(labels, others))


def _in_order_of_claims(
    public: PublicExamples, labels: Tensor, parts_of_class: Callable[[PublicExamples, int | None, int], list[Tensor]]
) -> list[Tensor]:
    """Return for each claimed label the next of as many parts of its class as claims have that label."""
    is_regression = labels.is_floating_point()
    classes = [None] * len(labels) if is_regression else labels.tolist()
    unused: dict[int | None, list[Tensor]] = {}
    for label in dict.fromkeys(classes):
        unused[label] = list(parts_of_class(public, label, classes.count(label)))
    return [unused[label].pop(0) for label in classes]


def _class_clusters(public: PublicExamples, label: int | None, count: int) -> list[Tensor]:
    """Return `count` clusters, as indices, of the public examples of a class; some may be equal."""

    def split_class() -> list[Tensor]:
        indices = torch.arange(len(public.data))
        if label is not None:
            class_indices = indices[public.labels == label]
            indices = class_indices if len(class_indices) else indices
        return _split(public.data, indices[:_MAX_EXAMPLES], count)

    return share_by_public(public, ("clusters", label, count), split_class)


def _summarize_clusters(
    public: PublicExamples, labels: Tensor, name: str, summarize: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `example ...`, what `summarize` makes of the public examples of each of `clusters_of_claims`."""

    def summarize_class(public: PublicExamples, label: int | None, count: int) -> list[Tensor]:
        def summarize_each() -> list[Tensor]:
            return [summarize(public.data[indices]) for indices in _class_clusters(public, label, count)]

        return share_by_public(public, (name, label, count), summarize_each)

    return torch.stack(_in_order_of_claims(public, labels, summarize_class))


def _split(data: Tensor, indices: Tensor, count: int) -> list[Tensor]:
    """Split `indices` into `count` clusters by k-means; repeat the largest if too few."""
    number = min(count, len(indices))
    if number < 2:
        return [indices] * count
    rows = data[indices].flatten(1).double().contiguous().numpy()
    # Runs of one experiment have equal public examples, which are other tensors.
    key = hashlib.sha256(rows.data).hexdigest(), rows.shape, number
    if key not in _cluster_numbers:
        if len(_cluster_numbers) >= _MAX_CLUSTERINGS:
            _cluster_numbers.pop(next(iter(_cluster_numbers)))
        _cluster_numbers[key] = _load_or_number_clusters(rows, number, key)
    cluster_of = _cluster_numbers[key]
    clusters = [indices[cluster_of == cluster] for cluster in range(number)]
    clusters = sorted((cluster for cluster in clusters if len(cluster)), key=len, reverse=True)
    return [clusters[position % len(clusters)] for position in range(count)]


def _load_or_number_clusters(rows: NDArray[np.float64], number: int, key: Hashable) -> Tensor:
    """Return `_number_clusters`, from a file where another process of this user has computed it already.

    Reports need these numbers for what scores had for floors, and importing scikit-learn takes a second.
    """
    packages = [f"{name} {version(name)}" for name in ("scikit-learn", "numpy", "scipy")]
    path = cache_folder() / "clusters" / f"{hash_json([repr(key), _K_MEANS, *packages])}.safetensors"
    if (cluster_numbers := _read_cluster_numbers(path, len(rows), number)) is not None:
        return cluster_numbers
    cluster_numbers = _number_clusters(rows, number)
    with suppress(OSError):  # a cache that cannot be written only costs time
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as temporary:
            save_file({_CLUSTERS: cluster_numbers.contiguous()}, temporary)
    return cluster_numbers


def _read_cluster_numbers(path: Path, length: int, number: int) -> Tensor | None:
    """Read the number of the cluster of each row; None where there is no such file, or a damaged one."""
    if not path.is_file():
        return None
    try:
        cluster_numbers = load_file(path)[_CLUSTERS]
    except (OSError, SafetensorError, KeyError):
        return None
    is_valid = cluster_numbers.dtype == torch.int32 and cluster_numbers.shape == (length,)
    return cluster_numbers if is_valid and bool(((cluster_numbers >= 0) & (cluster_numbers < number)).all()) else None


def _number_clusters(rows: NDArray[np.float64], number: int) -> Tensor:
    """Return the number of the cluster of each row."""
    from sklearn.cluster import KMeans  # takes half a second
    from sklearn.exceptions import ConvergenceWarning

    with _thread_limits().limit(limits=1), warnings.catch_warnings():  # the number of threads changes sums
        # Examples that occur several times may leave fewer distinct clusters.
        warnings.simplefilter("ignore", ConvergenceWarning)
        k_means = KMeans(number, **_K_MEANS)
        return torch.from_numpy(k_means.fit_predict(rows))


@cache
def _thread_limits() -> ThreadpoolController:
    """Return what limits the threads of the libraries that are loaded, which it searches for once."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
