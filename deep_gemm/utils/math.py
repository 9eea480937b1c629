"""Integer helpers, the casts to FP8, and UE8M0 scales."""

from deep_gemm.quantize import (
    ceil_to_ue8m0,
    pack_ue8m0_to_int,
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_custom_dims_cast_to_fp8,
    per_token_cast_to_fp8,
    unpack_ue8m0_from_int,
)
from deep_gemm.unavailable import cast_back_from_fp4, per_token_cast_to_fp4, transpose_packed_fp4

__all__ = [
    "align",
    "cast_back_from_fp4",
    "ceil_div",
    "ceil_to_ue8m0",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "transpose_packed_fp4",
    "unpack_ue8m0_from_int",
]


def ceil_div(x: int, y: int) -> int:
    """x / y rounded up, for integers and y > 0."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The smallest multiple of y that is not below x, for integers and y > 0."""
    return ceil_div(x, y) * y
