"""Which errors of torch are a device's fault."""

from __future__ import annotations

import pytest
import torch

from fedsim.base.errors import ends_training, is_device_failure, is_memory_error


def raised_while(cause: Exception, error: Exception, *, explicitly: bool) -> Exception:
    """Return an error of other code that caught `cause`."""
    try:
        try:
            raise cause
        except Exception:
            if explicitly:
                raise error from cause
            raise error  # noqa: B904, so that only the context tells
    except Exception as caught:
        return caught


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


@pytest.mark.parametrize("explicitly", [True, False])
def test_an_error_of_other_code_that_caught_the_devices_is_the_devices(explicitly: bool) -> None:
    lost = raised_while(torch.AcceleratorError("CUDA error: lost"), ValueError("no"), explicitly=explicitly)
    full = raised_while(torch.OutOfMemoryError("full"), ValueError("no"), explicitly=explicitly)
    assert (is_device_failure(lost), is_memory_error(lost)) == (True, False)
    assert (is_device_failure(full), is_memory_error(full)) == (True, True)


def test_after_an_assertion_on_a_device_no_client_trains() -> None:
    assert ends_training(RuntimeError("CUDA error: device-side assert triggered"))
    assert not ends_training(RuntimeError("shapes do not fit"))
