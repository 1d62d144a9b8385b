"""Which errors of torch are a device's fault."""

from __future__ import annotations

import pytest
import torch

from fedsim.base.errors import is_device_failure, is_memory_error


@pytest.mark.parametrize(
    ("error", "is_devices", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True, True),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True, False),
        (RuntimeError("CUDA error: unspecified launch failure"), True, False),  # before torch 2.8
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False, False),
        (RuntimeError("CUDA error: device-side assert triggered"), False, False),
        (RuntimeError("shapes do not fit"), False, False),
        (ValueError("CUDA error"), False, False),
    ],
    ids=repr,
)
def test_an_index_out_of_range_is_not_a_lost_device(error: Exception, is_devices: bool, is_memory: bool) -> None:
    assert (is_device_failure(error), is_memory_error(error)) == (is_devices, is_memory)
