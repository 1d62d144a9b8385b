"""What is fitted to public examples of an experiment: once in a process, and shared by all victims."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsim.base.errors import AttackError, join_first
from fedsim.base.task import are_classes
from fedsim.interfaces.attack import warn
from fedsim.interfaces.knowledge import Records
from fedsim.inversion.denoisers import Denoiser, load_denoiser
from fedsim.inversion.problem import InversionProblem

_Fit = TypeVar("_Fit")
_hashes: dict[int, str] = {}
"""Hash of records by their id."""
_fits: dict[tuple[Any, ...], Any] = {}
_MAX_NAMES = 5
_MAX_FITS = 10
"""Of a learnt inversion a fit takes about 150 MB."""
_NUM_PATCHES = 10_000
"""Patches of public examples that a mixture is fitted to."""
_LEAST_VARIANCE = 0.003
"""Added to the variance of each value of a patch, as a share of the variance of all."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ComponentFit:
    """Principal components of public examples in model units, each scaled to its standard deviation.

    Attributes:
        shape: of one example.
        mean: `value`, of all examples.
        total: `component value`, around that mean.
        class_means: `class value`, and the mean of all in a last row, for other classes; None where
            the records have no classes.
        within: `class component value`, around the means of the classes: those of a class's own records
            where it has twice as many as components, else those of all; None where there are no
            classes.
        residual: mean variance of a value that the components within a class leave out.
    """

    shape: tuple[int, ...]
    mean: Tensor
    total: Tensor
    class_means: Tensor | None
    within: Tensor | None
    residual: float


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchFit:
    """Mixture of Gaussians of the patches of public examples, standardised.

    Attributes:
        size: side of a patch.
        log_weights: `component`.
        means: `component value`.
        precisions: `component value value`, whose transposed product with themselves is the inverse
            of the covariance.
    """

    size: int
    log_weights: Tensor
    means: Tensor
    precisions: Tensor


def fit_components(problem: InversionProblem, count: int, shape: tuple[int, ...] | None = None) -> ComponentFit:
    """Fit principal components by scikit-learn.

    Args:
        count: number of components at most.
        shape: of the dummy data, which that of the records is checked against.
    """
    records = _check_records(problem, shape)
    like = problem.before[0]
    key = ("components", hash_records(records), count, like.device, like.dtype)

    def fit() -> ComponentFit:
        _check_variety(records, problem.where)
        flat = records.inputs.flatten(1).float().cpu()
        mean = flat.mean(0)
        total = _principal_components(flat - mean, count)
        class_means, within, residual = None, None, _left_out_variance(flat - mean, total)
        if are_classes(records.labels):
            labels = records.labels.cpu()
            class_means = _class_means(flat, labels)
            within, residual = _class_components(flat - class_means[labels], labels, count)
            class_means, within = class_means.to(like), within.to(like)
        return ComponentFit(
            shape=tuple(records.inputs.shape[1:]),
            mean=mean.to(like),
            total=total.to(like),
            class_means=class_means,
            within=within,
            residual=residual,
        )

    return remember_fit(key, fit)


def fit_patches(problem: InversionProblem, size: int, components: int, shape: tuple[int, ...]) -> PatchFit:
    """Fit a mixture of Gaussians to patches of public images by scikit-learn.

    Args:
        size: side of the patches; that of the images where these are smaller.
    """
    records = _check_records(problem, shape)
    _check_images(problem, shape, "a mixture of patches")
    like, side = problem.before[0], min(size, *shape[1:])
    moments = tuple(problem.scaling.centre.flatten().tolist() + problem.scaling.scale.flatten().tolist())
    key = ("patches", hash_records(records), side, components, moments, like.device, like.dtype)

    def fit() -> PatchFit:
        from sklearn.mixture import GaussianMixture  # takes a second

        scaling = problem.scaling
        images = ((records.inputs.to(like) - scaling.centre) / scaling.scale).cpu()
        rows = image_patches(images, side, stride=max(1, side // 2)).flatten(0, 1)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:_NUM_PATCHES]
        rows = rows[order].double()
        if (count := len(torch.unique(rows, dim=0))) < 2 * components:
            raise AttackError(
                f"{problem.where}: a mixture of {components} components is fitted to {2 * components} different "
                f"patches at least, and the auxiliary records have {count}; grant more records, or set fewer components"
            )
        least = _LEAST_VARIANCE * rows.var().item()
        mixture = GaussianMixture(components, reg_covar=least, random_state=0, max_iter=30).fit(rows.numpy())
        return PatchFit(
            size=side,
            log_weights=torch.from_numpy(mixture.weights_).log().to(like),
            means=torch.from_numpy(mixture.means_).to(like),
            precisions=torch.from_numpy(mixture.precisions_cholesky_).to(like),
        )

    return remember_fit(key, fit)


def fit_denoiser(problem: InversionProblem, shape: tuple[int, ...]) -> Denoiser:
    """Return a denoiser of public images, which is trained where the cache has none, see `load_denoiser`."""
    records = _check_records(problem, shape)
    _check_images(problem, shape, "a denoiser")
    like, scaling = problem.before[0], problem.scaling
    ends = tuple(scaling.low.flatten().tolist() + scaling.high.flatten().tolist())
    key = ("denoiser", hash_records(records), ends, like.device)

    def fit() -> Denoiser:
        _check_variety(records, problem.where)
        return load_denoiser(records, hash_records(records), scaling, like.device)

    return remember_fit(key, fit)


def _check_images(problem: InversionProblem, shape: tuple[int, ...], prior: str) -> None:
    if len(shape) != 3 or tuple(problem.smooth_dimensions) != (2, 3):
        raise AttackError(f"{problem.where}: {prior} is a prior of images; set prior = 'pca'")


def image_patches(images: Tensor, size: int, stride: int) -> Tensor:
    """Return all patches of images, `image patch value`.

    >>> image_patches(torch.zeros(2, 3, 8, 8), 4, 2).shape
    torch.Size([2, 9, 48])
    """
    patches = images.unfold(2, size, stride).unfold(3, size, stride)
    return patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def _check_records(problem: InversionProblem, shape: tuple[int, ...] | None) -> Records:
    return check_public_records(problem.auxiliary, shape, problem.where)


def check_public_records(records: Records | None, shape: Sequence[int] | None, where: str) -> Records:
    """Return the auxiliary records; raise AttackError where no prior can be fitted to them."""
    if records is None:
        raise AttackError(
            f"{where}: a prior is fitted to auxiliary records, and none are granted; set "
            "[adversary.knowledge] auxiliary = true"
        )
    found = tuple(records.inputs.shape[1:])
    if shape is not None and found != tuple(shape):
        raise AttackError(
            f"{where}: auxiliary records are of shape {found}, and the victim's of {tuple(shape)}; grant "
            "records of the same shape"
        )
    if len(records.inputs) < 2:
        raise AttackError(f"{where}: a prior is fitted to two auxiliary records at least; raise adversary.auxiliary")
    return records


def _check_variety(records: Records, where: str) -> None:
    """Raise AttackError where a prior would claim the one record of a class, and be certain of it."""
    classes = records.labels if are_classes(records.labels) else torch.zeros(len(records.inputs))
    for label in torch.unique(classes):
        members = records.inputs[classes == label]
        if bool((members != members[0]).any()):
            return
    raise AttackError(
        f"{where}: no two auxiliary records of a class differ, so that a prior would be certain of each class's "
        "examples; grant more records, or others"
    )


def warn_of_missing_classes(problem: InversionProblem, labels: Tensor, title: str) -> None:
    """Warn where no auxiliary record is of a class of the victim's, so that nothing is known of such examples."""
    records = problem.auxiliary
    if records is None or not (are_classes(records.labels) and are_classes(labels)):
        return
    if missing := sorted(set(labels.tolist()) - set(records.labels.tolist())):
        warn(
            f"{title} on {problem.where}: no auxiliary record is of class {join_first(map(str, missing), _MAX_NAMES)}, "
            "so examples of it are taken for the average of the others; grant records of all classes"
        )


def hash_records(records: Records) -> str:
    """Return the SHA-256 of inputs and labels, computed once for each object."""
    key = id(records)
    if key not in _hashes:
        _hashes[key] = hash_tensors({"inputs": records.inputs, "labels": records.labels})
        weakref.finalize(records, _hashes.pop, key, None)
    return _hashes[key]


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors with their names, types and shapes."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def remember_fit(key: tuple[Any, ...], fit: Callable[[], _Fit]) -> _Fit:
    """Return what `fit` returned when it was last called for this key, or call it.

    Args:
        key: all that the result follows from.
    """
    if key not in _fits:
        if len(_fits) >= _MAX_FITS:
            _fits.pop(next(iter(_fits)))
        _fits[key] = fit()
    result: _Fit = _fits[key]
    return result


def _principal_components(centred: Tensor, count: int) -> Tensor:
    """Return the first components of centred rows, each times its standard deviation."""
    from sklearn.decomposition import PCA  # takes a second

    most = min(count, len(centred) - 1, centred.shape[1])
    if bool((centred == centred[0]).all()):  # scikit-learn would divide by their variance
        return torch.zeros(most, centred.shape[1])
    fitted = PCA(most, random_state=0).fit(centred.double().numpy())
    scales = torch.from_numpy(fitted.explained_variance_).sqrt()
    return (torch.from_numpy(fitted.components_) * scales[:, None]).float()


def _class_means(flat: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of each class; that of all for a class without records, and in a last row."""
    num_classes = int(labels.max()) + 2
    sums = torch.zeros(num_classes, flat.shape[1]).index_add_(0, labels, flat)
    counts = torch.bincount(labels, minlength=num_classes)[:, None]
    return torch.where(counts > 0, sums / counts.clamp_min(1), flat.mean(0))


def _class_components(centred: Tensor, labels: Tensor, count: int) -> tuple[Tensor, float]:
    """Return the components within each class, a last one for other classes, and what they leave out."""
    of_all = _principal_components(centred, count)
    rows, left_out = [], 0.0
    for label in range(int(labels.max()) + 2):
        members = centred[labels == label]
        components = of_all
        if len(members) >= 2 * len(of_all):
            components = _principal_components(members, len(of_all))
        rows.append(components)
        left_out += len(members) / len(centred) * _left_out_variance(members, components)
    return torch.stack(rows), left_out


def _left_out_variance(centred: Tensor, components: Tensor) -> float:
    """Return the mean variance of a value without the part that the components explain."""
    if len(centred) < 2:
        return 0.0
    left_out = centred.square().mean() - components.square().sum(0).mean()
    return max(0.0, left_out.item())
