"""Public names that exist, since clients look for them at import, and that raise when called.

Loaders (transformers') demand them by name and catch `NotImplementedError` at the call. Every other
name that is not implemented does not exist, so that `hasattr` tells the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

_SM100 = "needs an SM100 GPU and this library is for Hopper (SM90)"
_MEGA = f"{_SM100}; run the experts through grouped GEMMs instead"
_FP4 = f"{_SM100}, which has no FP4 tensor cores; per_block_cast_to_fp8 makes FP8"


def _unavailable(name: str, reason: str) -> Callable[..., NoReturn]:
    def function(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{name} {reason}")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Raises NotImplementedError: {name} {reason}."
    return function


class SymmBuffer:
    """Raises NotImplementedError: the buffer of mega MoE, which is for SM100 GPUs."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"SymmBuffer {_MEGA}")


get_symm_buffer_for_mega_moe = _unavailable("get_symm_buffer_for_mega_moe", _MEGA)
transform_weights_for_mega_moe = _unavailable("transform_weights_for_mega_moe", _MEGA)
fp8_fp4_mega_moe = _unavailable("fp8_fp4_mega_moe", _MEGA)
bf16_mega_moe = _unavailable("bf16_mega_moe", _MEGA)

per_token_cast_to_fp4 = _unavailable("per_token_cast_to_fp4", _FP4)
transpose_packed_fp4 = _unavailable("transpose_packed_fp4", _FP4)
cast_back_from_fp4 = _unavailable("cast_back_from_fp4", _FP4)
