"""The settings that programs change by function; plain host state, no function makes a context."""

from __future__ import annotations

import torch

from deep_gemm import driver
from deep_gemm.config import settings
from deep_gemm.types import Backend

HOPPER_SMS = 132  # of an H100 SXM or H200: what plans are made for where there is no GPU


def set_num_sms(num_sms: int) -> None:
    """Let every launch use at most `num_sms` SMs; 0 means all of the device again.

    Raises ValueError below 0, and above the current device's count once CUDA is in use.
    """
    _check_int("num_sms", num_sms, 0)
    if torch.cuda.is_initialized():
        available, _ = driver.device_properties(torch.cuda.current_device())
        if num_sms > available:
            raise ValueError(
                f"num_sms is {num_sms}, expected 0 to {available}, the SMs of "
                f"{torch.cuda.get_device_name()}; 0 means all of them"
            )
    settings.num_sms = num_sms


def get_num_sms() -> int:
    """SMs that a launch may use: what was set, else all of the current device, 132 without one."""
    if settings.num_sms:
        return settings.num_sms
    if not torch.cuda.is_available():
        return HOPPER_SMS
    return driver.device_properties(torch.cuda.current_device())[0]


def set_tc_util(tc_util: int) -> None:
    """Note the percentage, 0 to 100, of tensor-core time that the caller wants used.

    Kept for compatibility: it changes no result, and no plan of this version.
    """
    _check_int("tc_util", tc_util, 0, 100)
    settings.tc_util = tc_util


def get_tc_util() -> int:
    """What `set_tc_util` has set, 100 at first."""
    return settings.tc_util


def set_pdl(enable: bool) -> None:
    """Use programmatic dependent launch: a kernel's start overlaps its predecessor's end."""
    if enable not in (True, False):
        raise TypeError(f"enable is {enable!r}, expected True or False")
    settings.pdl = bool(enable)


def get_pdl() -> bool:
    """Whether programmatic dependent launch is on; off at first."""
    return settings.pdl


def set_ignore_compile_dims(ignore: bool) -> None:
    """Accepted for compatibility, without effect: no size is ever compiled into a kernel here."""


def set_block_size_multiple_of(multiple_of: int | tuple[int, int]) -> None:
    """Accepted for compatibility, without effect: tiles are stored exactly, whatever their size.

    `multiple_of` is one positive integer, or two for (m, n).
    """
    pair = (multiple_of, multiple_of) if isinstance(multiple_of, int) else tuple(multiple_of)
    if len(pair) != 2:
        raise ValueError(f"multiple_of is {multiple_of!r}, expected an integer or two, for (m, n)")
    for size in pair:
        _check_int("multiple_of", size, 1)


def set_backend(name: Backend | None) -> None:
    """Choose what computes: "auto" or "sm90" our kernels on Hopper, "reference" PyTorch operations.

    CPU tensors always run on the reference backend. None returns to `DG_BACKEND`, else "auto".
    Raises ValueError for other names.
    """
    settings.backend = name


def get_backend() -> Backend:
    """The backend in force: what `set_backend` chose, else `DG_BACKEND`, else "auto"."""
    return settings.backend


def init(lib_root: str = "", cuda_home: str = "") -> None:
    """Accepted for compatibility, without effect: nothing has to be set up before a call."""


def _check_int(name: str, value: int, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected an int")
    if value < low or (high is not None and value > high):
        limits = f"{low} or more" if high is None else f"{low} to {high}"
        raise ValueError(f"{name} is {value}, expected {limits}")
