"""The CUDA driver: one `check` for every status, device facts, and a current context per thread."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class DriverError(RuntimeError):
    """A CUDA driver call failed; the text names the call, the status and what the status means."""


def check(result: tuple[Any, ...], what: str) -> Any:
    """Unpack what a `cuda.bindings.driver` call returned, or raise `DriverError`.

    Returns None, the one value, or a tuple of values that followed the status.
    """
    status, *values = result
    if int(status) != 0:
        raise DriverError(f"{what}: {status.name} ({_describe(status)})")
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def _describe(status: Any) -> str:
    from cuda.bindings import driver

    error, text = driver.cuGetErrorString(status)
    return text.decode() if int(error) == 0 and text else "no description"


@functools.cache
def api() -> Any:
    """The `cuda.bindings.driver` module, with the driver initialised."""
    from cuda.bindings import driver

    try:
        check(driver.cuInit(0), "cuInit")
    except (RuntimeError, ImportError) as error:
        if isinstance(error, DriverError):
            raise
        raise DriverError(f"the CUDA driver (libcuda.so.1) cannot be loaded: {error}") from error
    return driver


@functools.cache
def device_properties(index: int) -> tuple[int, tuple[int, int]]:
    """(number of SMs, compute capability) of CUDA device `index`."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, (properties.major, properties.minor)


@functools.cache
def primary_context(index: int) -> Any:
    """The context that torch uses on device `index`; it is never released, as torch's is not."""
    device = check(api().cuDeviceGet(index), "cuDeviceGet")
    return check(api().cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")


@contextmanager
def context(index: int) -> Iterator[None]:
    """Make the device's primary context current in this thread."""
    check(api().cuCtxPushCurrent(primary_context(index)), "cuCtxPushCurrent")
    try:
        yield
    finally:
        check(api().cuCtxPopCurrent(), "cuCtxPopCurrent")
