"""Consistency of a mixture's columns with one another and with the inputs that they give, and repair of columns."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from adversaries.exact.components import neighbour_differences
from adversaries.exact.layer import FirstLayer
from adversaries.exact.mixture import InputMixture
from adversaries.exact.silence import fit_trimmed_column

CERTIFIED_PSNR = 60.0
"""PSNR in dB that a certified input is sure to reach: its error stays below 1/1000 of the range."""
_ERROR_MARGIN = 2.0
"""Factor by which an input's estimated error must be below what `CERTIFIED_PSNR` allows."""
_LEAST_AGREEMENT = 0.75
"""Smallest share of units about which a certified input and its column must agree."""
_LEAST_DROP, _DEVIATIONS = 0.03, 6.0
"""If ratios are shared, an input's agreement may be below the median by this, or by this many
median deviations."""
_NUM_WORST = 4
"""Number of the least consistent inputs that are examined in a round, and number of rounds."""
_PINNING_LEVERAGE = 0.999
"""Leverage from which a unit alone determines a column, as any other column could be."""
_SHARED_ZEROS = 0.9
"""Smallest share of the zeros of a sum that are zeros of each of its parts, where rounding makes many by chance."""
_SAME_COSINE = 1 - 1e-6
_ABSOLUTE_ROUNDS, _SMALL = 20, 1e-6
_ROUNDINGS = 4.0
"""Rounding errors within which two ratios are equal."""
_LEAST_ERROR = 1e-9
_LEAST_CROWD, _DENSITY_FACTOR, _NEIGHBOURHOOD = 5, 6.0, 20.0
_LOG_GAP = 1e3
"""Larger than the difference of the logarithms of any two ratios."""


def certify_inputs(mixture: InputMixture, layer: FirstLayer, columns: Tensor) -> Tensor:
    """Return which inputs are exact for sure, `example`.

    An input is certified if its error by rounding is well below what `CERTIFIED_PSNR` allows, and
    if it lies in the range of an input. Besides, no column may be a sum (`find_sum_column`), and
    there must be one for each of the N examples: two examples whose gradients are proportional, as
    nearly equal ones may have, share a column, which gives a mean of both.

    Args:
        columns: all of them, scaled.
    """
    largest_error = layer.range_width * 10 ** (-CERTIFIED_PSNR / 20)
    inputs = mixture.unmix_inputs(columns)
    in_range = (inputs - layer.clamp_inputs(inputs)).abs().amax(1) < largest_error
    has_all = mixture.rank == layer.problem.num_examples
    complete = has_all and find_sum_column(mixture, layer, columns) is None
    return (_ERROR_MARGIN * mixture.input_errors(columns) < largest_error) & in_range & complete


def find_sum_column(mixture: InputMixture, layer: FirstLayer, columns: Tensor) -> int | None:
    """Return the column that most looks like a sum of several; None if each is of one example.

    Each column must be determined by those of its zeros that its own input leaves silent: of two
    examples that fire nearly the same units, a sum may have zeros where they cancel.

    As many independent columns as there are examples are of one example each if no two have an
    example in common. Two that do have `shared_ratios`, unless they are sums of so many that few
    units fire for one alone; but then there are few zeros, and many units that the column's own
    input leaves silent are none of them. Two columns of one example each may have a shared ratio as
    well: after one step of a network with one hidden layer, those of a class. Then a column is a
    sum if it is zero only where the other one is, too, or if it agrees worse with the signs of its
    own input than the others do with theirs.

    Args:
        columns: all of them, scaled.
    """
    inputs, zeros = layer.clamp_inputs(mixture.unmix_inputs(columns)), mixture.find_zeros(columns)
    silent = zeros.T & (layer.silence(inputs)[:, mixture.unit_indices] > 0)
    # Look for columns that their zeros do not determine.
    for index, units in enumerate(silent):
        if mixture.rank > 1 and not mixture.is_determined(units, _PINNING_LEVERAGE):
            return index
    # Look for sums of an example and another column.
    for first, second, _ in _sum_pairs(mixture, columns):
        # Like images of a class look like sums, but are zero where their own inputs alone are silent.
        if int((silent[first] & ~zeros[:, second]).sum()) <= _LEAST_CROWD:
            return first
    # Look for columns that disagree with their inputs.
    agreement = layer.agreement(inputs, zeros, mixture.unit_indices)
    worst, median = int(agreement.argmin()), float(agreement.median())
    if agreement[worst] <= _LEAST_AGREEMENT:
        return worst
    deviation = float((agreement - median).abs().median())
    if agreement[worst] > median - max(_LEAST_DROP, _DEVIATIONS * deviation):
        return None
    has_shared_ratio = next(shared_ratios(mixture, columns), None) is not None
    return worst if has_shared_ratio else None


def _sum_pairs(mixture: InputMixture, columns: Tensor) -> list[tuple[int, int, float]]:
    """Return pairs with a shared ratio, of which the first is zero only where the second is, and the ratio.

    By chance a sum may have other zeros, where its parts cancel. Two like images of a class are
    zero at mostly the same units as well, but not at all of them.
    """
    zeros = mixture.find_zeros(columns)
    num_outside = zeros.double().T @ (~zeros).double()
    largest_share = (1 - _SHARED_ZEROS) * zeros.sum(0)
    is_inside = num_outside < torch.minimum(largest_share, mixture.most_chance_zeros(columns))[:, None]
    pairs = []
    for first, second, ratio in shared_ratios(mixture, columns, is_inside | is_inside.T):
        if is_inside[first, second]:
            pairs.append((first, second, ratio))
        if is_inside[second, first]:
            pairs.append((second, first, 1 / ratio))
    return sorted(pairs)


def repair_columns(mixture: InputMixture, layer: FirstLayer, columns: list[Tensor]) -> list[Tensor]:
    """Replace columns that are sums of several examples; their number stays the same.

    If a column is a sum of a missing one and one that is there, their ratio gives the missing one.
    If it is a sum of a missing one and several others, the input that is unmixed with it is
    nevertheless that of the missing one, whose silence then leads to its column.
    """
    columns = _subtract_parts(mixture, layer, columns)
    for _ in range(_NUM_WORST):
        # Examine the inputs that agree least with their columns.
        scaled = mixture.scale_columns(torch.stack(columns, 1))
        inputs = layer.clamp_inputs(mixture.unmix_inputs(scaled))
        agreement = layer.agreement(inputs, mixture.find_zeros(scaled), mixture.unit_indices)
        silence = layer.silence(inputs)[:, mixture.unit_indices]
        for index in agreement.argsort()[:_NUM_WORST].tolist():
            others = columns[:index] + columns[index + 1 :]
            column = fit_trimmed_column(mixture, silence[index])
            if column is None or float((column @ columns[index]).abs()) > _SAME_COSINE:
                continue
            if mixture.add_column(others, column):
                columns = others
                break
        else:
            break
    return columns


def _subtract_parts(mixture: InputMixture, layer: FirstLayer, columns: list[Tensor]) -> list[Tensor]:
    """Replace sums by what remains of them without their other part; try two differences for each column at most.

    Of like images of a class, whose gradients are nearly proportional, the ratio may be another one. What remains then
    has zeros at most units, but those that its input leaves silent do not determine it.
    """
    tries_left = 2 * len(columns)
    for _ in range(len(columns)):
        for sum_index, part_index, ratio in _sum_pairs(mixture, torch.stack(columns, 1))[:tries_left]:
            tries_left -= 1
            others = columns[:sum_index] + columns[sum_index + 1 :]
            difference = columns[sum_index] - ratio * columns[part_index]
            column = mixture.refine_column(difference / difference.norm())
            if column is None or not mixture.add_column(others, column):
                continue
            if mixture.is_determined(_find_own_zeros(mixture, layer, others), _PINNING_LEVERAGE):
                columns = others
                break
        else:
            break
    return columns


def _find_own_zeros(mixture: InputMixture, layer: FirstLayer, columns: list[Tensor]) -> Tensor:
    """Return `unit`, the zeros of the last column that its own input leaves silent."""
    inputs = mixture.unmix_inputs(mixture.scale_columns(torch.stack(columns, 1)))[-1:]
    is_silent = layer.silence(layer.clamp_inputs(inputs))[0, mixture.unit_indices] > 0
    return mixture.find_zeros(columns[-1][:, None])[:, 0] & is_silent


def subtract_unknown_inputs(layer: FirstLayer, inputs: Tensor, count: int) -> Tensor:
    """Subtract from the first `count` inputs what they contain of the others, `example input`.

    While columns are missing, each input is known but for multiples of those whose columns are
    missing. Those multiples are subtracted without which the neighbouring values of an image differ
    least, in the sum of absolute differences; for a table, the values themselves.

    Args:
        inputs: `example input`, first those whose columns are certain.
        count: number of certain columns.
    """
    values = inputs
    if len(layer.shape) == 3:
        values = neighbour_differences(inputs.reshape(-1, *layer.shape))
    others = values[count:]
    results = []
    for index in range(count):
        # Least absolute values by reweighted least squares.
        weights = torch.ones(values.shape[1], dtype=values.dtype)
        for _ in range(_ABSOLUTE_ROUNDS):
            target = (values[index] * weights)[:, None]
            multiples = torch.linalg.lstsq((others * weights).T, target).solution[:, 0]
            residual = values[index] - multiples @ others
            weights = residual.abs().clamp_min(_SMALL).rsqrt()
        own_share = 1 - multiples.sum()
        divisor = torch.where(own_share.abs() > _SMALL, own_share, 1)
        results.append((inputs[index] - multiples @ inputs[count:]) / divisor)
    return torch.stack(results)


def shared_ratios(
    mixture: InputMixture, columns: Tensor, compared: Tensor | None = None
) -> Iterator[tuple[int, int, float]]:
    """Yield pairs of columns, and the ratio of their gradients that many units share.

    Columns of different examples have as many ratios as units. Two sums that have an example in
    common have the same ratio at all units that fire for it alone. Units are many if they are more
    than `_LEAST_CROWD`, and more than `_DENSITY_FACTOR` times as many as expected from a
    neighbourhood that is `_NEIGHBOURHOOD` times as wide.

    Args:
        columns: `rank example`.
        compared: `example example`, symmetric, which pairs to compare; all by default, which takes
            long for many examples.
    """
    gradients = (mixture.rows @ columns).T
    relative_errors = mixture.gradient_rounding(columns)[:, None] / gradients.abs()
    if gradients.shape[1] <= _LEAST_CROWD:  # too few units for many to share anything
        return
    if compared is None:
        compared = torch.ones((len(gradients),) * 2, dtype=torch.bool)
    for first, others in enumerate(compared.triu(1)):
        seconds = others.nonzero()[:, 0]
        if not len(seconds):
            continue
        quotients = gradients[first] / gradients[seconds]
        errors = _ROUNDINGS * (relative_errors[first] + relative_errors[seconds])
        for row, ratio in _crowded_ratios(quotients, errors.clamp_min(_LEAST_ERROR)):
            yield first, int(seconds[row]), ratio


def _crowded_ratios(quotients: Tensor, errors: Tensor) -> Iterator[tuple[int, float]]:
    """Yield each row of `row unit` in which many quotients are equal, and that quotient.

    Args:
        quotients: `row unit`.
        errors: `row unit`, relative; quotients are equal within them.
    """
    # Place the quotients on a line: by logarithm, far apart by sign, and uncertain ones far away.
    certain = errors < 1
    places = quotients.abs().log() + torch.where(quotients > 0, 0, _LOG_GAP)
    far_places = _LOG_GAP * torch.arange(2, 2 + errors.shape[1], dtype=errors.dtype)
    places = torch.where(certain, places, far_places)
    errors = torch.where(certain, errors, _LEAST_ERROR)
    # Keep the rows with a crowd; most have none.
    ordered, index = places.sort(dim=1)
    reach = errors.gather(1, index).unfold(1, _LEAST_CROWD + 1, 1).amax(2)
    widths = ordered[:, _LEAST_CROWD:] - ordered[:, :-_LEAST_CROWD]
    dense = (widths <= 2 * reach).any(1).nonzero()[:, 0]
    quotients, places, errors = quotients[dense], places[dense], errors[dense]
    ordered = ordered[dense]
    # Compare each crowd with its neighbourhood.
    crowd = _count_neighbours(ordered, places, errors)
    neighbourhood = _count_neighbours(ordered, places, _NEIGHBOURHOOD * errors)
    excess = crowd - _DENSITY_FACTOR / _NEIGHBOURHOOD * neighbourhood - _LEAST_CROWD
    best_unit = excess.argmax(1)
    for row in (excess.amax(1) > 0).nonzero()[:, 0].tolist():
        yield int(dense[row]), float(quotients[row, best_unit[row]])


def _count_neighbours(ordered: Tensor, places: Tensor, errors: Tensor) -> Tensor:
    """Count for each of `row unit` the places of its row that are within its error.

    Args:
        ordered: `row unit`, the places in ascending order.
        places: `row unit`.
        errors: `row unit`.
    """
    above = torch.searchsorted(ordered, places + errors, right=True)
    return above - torch.searchsorted(ordered, places - errors)
