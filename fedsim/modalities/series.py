"""Time series and audio: `channel time`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.interfaces.modality import GuessMaterial, Modality
from fedsim.modalities.guesses import class_means, general_guesses

_WIDTH, _CHANNEL_HEIGHT = 240, 56
"""Size of a drawing in its own units: its width, and the height of one channel."""
_MAX_POINTS = 120
"""Most points of a line that is drawn; of a longer one, every second or third and so on."""
_MAX_CHANNELS = 4


@dataclass(frozen=True)
class SeriesModality(Modality):
    """Series of several channels, whose neighbouring times are alike."""

    axes = ("channel", "time")
    noun = "series"
    plural = "series"
    smooth_axes = ("time",)

    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return the general guesses, and two of forecasting where public series are known.

        `last value` holds the last value of the claimed class's mean series at all times, and
        `seasonal mean` repeats that series' mean season, see `repeat_season`.
        """
        guesses = general_guesses(material, middle_name="mid-range")
        if material.public is None:
            return guesses
        labels = material.labels
        if labels.is_floating_point():  # targets of a regression are no classes
            labels = labels.new_empty(0, dtype=torch.int64)
        means = class_means(material.public, labels, material.count)
        guesses["last value"] = means[..., -1:].expand_as(means)
        guesses["seasonal mean"] = repeat_season(means, find_period(material.public.data))
        return guesses

    def draw_example(self, claimed: Tensor, true: Tensor | None) -> str:
        """Return lines of the claimed series over the true one, the channels one below the other."""
        channels = min(_MAX_CHANNELS, len(claimed))
        height = channels * _CHANNEL_HEIGHT
        paths = []
        for channel in range(channels):
            top = channel * _CHANNEL_HEIGHT
            if true is not None:
                paths.append(f'<path class="true" d="{_line_path(true[channel], top)}"/>')
            paths.append(f'<path class="claimed" d="{_line_path(claimed[channel], top)}"/>')
        return f'<svg viewBox="0 0 {_WIDTH} {height}">{"".join(paths)}</svg>'


def find_period(series: Tensor) -> int:
    """Return the length of the strongest season of `example channel time`; all of it for none.

    It is the period with the most power, on average over examples and channels.

    >>> wave = torch.sin(torch.arange(32) * torch.pi / 4)
    >>> find_period(wave.reshape(1, 1, 32))
    8
    """
    length = series.shape[-1]
    centred = series.double() - series.double().mean(-1, keepdim=True)
    power = torch.fft.rfft(centred).abs().square().flatten(0, -2).mean(0)
    # A wave that fits less than twice into the series is a trend and no season.
    power[:2] = 0
    if not power.any():
        return length
    return max(1, round(length / int(power.argmax())))


def repeat_season(series: Tensor, period: int) -> Tensor:
    """Return `... time`, each value replaced by the mean of those at the same phase of a season.

    >>> repeat_season(torch.tensor([0.0, 4.0, 2.0, 6.0]), 2)
    tensor([1., 5., 1., 5.])
    """
    phases = torch.arange(series.shape[-1]) % period
    means = torch.zeros_like(series)
    for phase in range(period):
        means[..., phases == phase] = series[..., phases == phase].mean(-1, keepdim=True)
    return means


def _line_path(values: Tensor, top: float) -> str:
    """Return the SVG path of one channel, values in [0, 1], in the box that begins at `top`."""
    stride = -(-len(values) // _MAX_POINTS)
    shown = values.double()[::stride]
    margin = 2
    heights = top + margin + (1 - shown) * (_CHANNEL_HEIGHT - 2 * margin)
    step = _WIDTH / max(1, len(shown) - 1)
    points = [f"{step * place:.1f},{height:.1f}" for place, height in enumerate(heights.tolist())]
    return "M" + " L".join(points)
