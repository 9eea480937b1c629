"""Casts to FP8 (E4M3) with one scale per block: per token, per channel, per square block.

A block of x becomes q = e4m3(x * (1 / sf)) with sf = max(amax, amax_floor) / 448, where amax is the
largest finite |x| of the block (DeepSeek-V3 Technical Report, section 3.3.2). With `use_ue8m0`, sf
is rounded up to a power of two. Division, reciprocal and product are rounded to nearest even, each
by itself, in float32, on CPU and GPU alike: both give the same bits.

- q * sf differs from x by 2**-4 |x| at most, or by 2**-10 sf where that is more.
- A block of zeros becomes zeros with the scale amax_floor / 448. The sign of zero is kept.
- NaN and infinity become NaN (0x7F, E4M3 has no infinity) and leave the rest of their block alone:
  it is quantised as if they were 0.
- Sizes need not be multiples of a block; the last blocks are smaller. Empty tensors are fine.

On a Hopper GPU each cast is one kernel launch on the current stream. x may have any strides. It is
fast where the elements of a row are adjacent, the width is a multiple of 16, and rows start at
multiples of 16 bytes; elsewhere elements are read one by one, which is right but slower.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from deep_gemm import jit, launch
from deep_gemm.checks import check_gpu
from deep_gemm.config import settings
from deep_gemm.layout import (
    empty_native,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor,
    pack_ue8m0_to_int,
    unpack_ue8m0_from_int,
)
from deep_gemm.types import LaunchConfig

__all__ = [
    "ceil_to_ue8m0",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp8",
    "unpack_ue8m0_from_int",
]

Pair = tuple[torch.Tensor, torch.Tensor]

AMAX_FLOOR = 1e-4  # of DeepSeek's quantisers: blocks below use less and less of the range of E4M3
_MIN_AMAX_FLOOR = 448 * 2.0**-126  # scales stay normal numbers, and their reciprocals finite
_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_FP8_NAN = 0x7F
_GRANULARITIES = (32, 64, 128)
_INPUT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # cast_common.cuh
_CHUNK = 16  # consecutive elements that a thread takes, likewise
_NUM_THREADS = 256
_CHANNEL_BLOCK_N = 128  # columns that a CTA of the per-channel cast takes


def per_token_cast_to_fp8(
    x: torch.Tensor,
    use_ue8m0: bool = False,
    gran_k: int = 128,
    use_packed_ue8m0: bool = False,
    *,
    amax_floor: float = AMAX_FLOOR,
) -> Pair:
    """Quantise activations: one scale per row and `gran_k` channels.

    Args:
        x: float32, bfloat16 or float16 [m, k].
        use_ue8m0: round scales up to powers of two.
        gran_k: 32, 64 or 128.
        use_packed_ue8m0: pack four scales into an int32; needs `use_ue8m0`.
        amax_floor: the least maximum that a block counts as having, 5.3e-36 or more. Lower it for
            data far below 1e-4, such as gradients.

    Returns:
        float8_e4m3fn [m, k], and scales float32 [m, ceil(k / gran_k)] in the layout that the GEMM
        loads: strides (1, align(m, 4)). Packed: int32 [m, ceil(k / (4 * gran_k))], likewise.

    Raises TypeError and ValueError for arguments outside of this, NotImplementedError for a GPU
    other than Hopper.
    """
    _check(x, gran_k, amax_floor)
    if use_packed_ue8m0 and not use_ue8m0:
        raise ValueError("use_packed_ue8m0 needs use_ue8m0=True: only powers of two can be packed")
    if _has_kernel(x):
        m, k = x.shape
        num_k_blocks = -(-k // gran_k)
        sf = empty_native(m, num_k_blocks, x.device)
        config = {"NUM_THREADS": _NUM_THREADS, "NUM_CHUNKS": 2}
        rows_per_warp = config["NUM_CHUNKS"] * 32 * _CHUNK // gran_k
        num_warps = -(-m // rows_per_warp) * num_k_blocks
        grid = -(-num_warps // (_NUM_THREADS // 32))
        stride = sf.stride(1)
        q = _launch("per_token_cast", x, sf, stride, use_ue8m0, gran_k, amax_floor, grid, config)
    else:
        q, sf = _cast(x, (1, gran_k), use_ue8m0, amax_floor)
        sf = get_mn_major_tma_aligned_tensor(sf)
    return q, get_mn_major_tma_aligned_packed_ue8m0_tensor(sf) if use_packed_ue8m0 else sf


def per_channel_cast_to_fp8(
    x: torch.Tensor,
    use_ue8m0: bool = False,
    gran_k: int = 128,
    *,
    amax_floor: float = AMAX_FLOOR,
) -> Pair:
    """Quantise along the first dimension: one scale per column and `gran_k` rows.

    For gradients of weights, whose K dimension are the tokens. Arguments and errors are those of
    `per_token_cast_to_fp8`, with `x` as [k, n].

    Returns:
        float8_e4m3fn [k, n], and scales float32 [ceil(k / gran_k), n], contiguous.
    """
    _check(x, gran_k, amax_floor)
    if not _has_kernel(x):
        return _cast(x, (gran_k, 1), use_ue8m0, amax_floor)
    k, n = x.shape
    sf = torch.empty((-(-k // gran_k), n), dtype=torch.float32, device=x.device)
    config = {
        "NUM_THREADS": _NUM_THREADS,
        "NUM_CHUNKS": gran_k * _CHANNEL_BLOCK_N // _CHUNK // _NUM_THREADS,
        "BLOCK_N": _CHANNEL_BLOCK_N,
    }
    grid = len(sf) * -(-n // _CHANNEL_BLOCK_N)
    q = _launch("per_channel_cast", x, sf, n, use_ue8m0, gran_k, amax_floor, grid, config)
    return q, sf


def per_block_cast_to_fp8(
    x: torch.Tensor,
    use_ue8m0: bool = False,
    gran_k: int = 128,
    *,
    amax_floor: float = AMAX_FLOOR,
) -> Pair:
    """Quantise weights: one scale per `gran_k` x `gran_k` block.

    Arguments and errors are those of `per_token_cast_to_fp8`, with `x` as [n, k].

    Returns:
        float8_e4m3fn [n, k], and scales float32 [ceil(n / gran_k), ceil(k / gran_k)], contiguous.
    """
    _check(x, gran_k, amax_floor)
    if not _has_kernel(x):
        return _cast(x, (gran_k, gran_k), use_ue8m0, amax_floor)
    n, k = x.shape
    num_k_blocks = -(-k // gran_k)
    sf = torch.empty((-(-n // gran_k), num_k_blocks), dtype=torch.float32, device=x.device)
    num_chunks = gran_k * gran_k // _CHUNK
    num_threads = min(_NUM_THREADS, num_chunks)
    config = {"NUM_THREADS": num_threads, "NUM_CHUNKS": num_chunks // num_threads}
    q = _launch(
        "per_block_cast", x, sf, num_k_blocks, use_ue8m0, gran_k, amax_floor, sf.numel(), config
    )
    return q, sf


def per_custom_dims_cast_to_fp8(
    x: torch.Tensor,
    dims: Sequence[int],
    use_ue8m0: bool = False,
    *,
    amax_floor: float = AMAX_FLOOR,
) -> Pair:
    """Quantise with one scale per index into the dimensions `dims`, in PyTorch operations.

    Args:
        x: float32, bfloat16 or float16 of any rank.
        dims: the dimensions along which scales differ, such as (0,) for one scale per row.

    Returns:
        float8_e4m3fn of the shape of `x`, and float32 scales with the sizes of `dims`, ascending.
    """
    _check_dtype(x)
    _check_amax_floor(amax_floor)
    outside = [dim for dim in dims if not -x.dim() <= dim < x.dim()]
    if outside:
        raise ValueError(f"dims has {outside[0]}, expected dimensions of x, which has {x.dim()}")
    kept = sorted({dim % x.dim() for dim in dims})
    reduced = [dim for dim in range(x.dim()) if dim not in kept]
    q, sf = _quantise(x.detach().float(), reduced, use_ue8m0, amax_floor)
    return q, sf.reshape([x.shape[dim] for dim in kept])


def ceil_to_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """|x| rounded up to a power of two, float32 of the same shape, from bits alone.

    Powers of two stay as they are. The range is 2**-126, also for 0, to 2**127, also for what lies
    above; NaN and infinity give NaN, the code 255 of UE8M0.
    """
    bits = x.detach().float().view(torch.int32) & 0x7FFFFFFF
    exponents = (bits + 0x7FFFFF) >> 23  # a carry out of the mantissa is the next exponent
    powers = (exponents.clamp(1, 254) << 23).view(torch.float32)
    return powers.masked_fill(bits >= 0x7F800000, math.nan)


class _CastArgs(ctypes.Structure):
    """`struct CastArgs` of the kernels."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("q", ctypes.c_uint64),
        ("sf", ctypes.c_uint64),
        ("stride_row", ctypes.c_int64),
        ("stride_col", ctypes.c_int64),
        ("sf_stride", ctypes.c_int64),
        ("rows", ctypes.c_uint32),
        ("cols", ctypes.c_uint32),
        ("amax_floor", ctypes.c_float),
        ("use_ue8m0", ctypes.c_uint32),
    )


def _launch(
    kernel: str,
    x: torch.Tensor,
    sf: torch.Tensor,
    sf_stride: int,
    use_ue8m0: bool,
    gran_k: int,
    amax_floor: float,
    grid: int,
    config: dict[str, int],
) -> torch.Tensor:
    """Run a cast into `sf` and a new q, which is returned."""
    q = torch.empty(x.shape, dtype=_FP8, device=x.device)
    if grid == 0:
        return q
    (rows, cols), (stride_row, stride_col) = x.shape, x.stride()
    is_aligned = (
        cols % _CHUNK == 0
        and stride_col == 1
        and (rows == 1 or stride_row * x.element_size() % 16 == 0)
        and x.data_ptr() % 16 == 0
    )
    constants = config | {
        "INPUT_TYPE": _INPUT_TYPES[x.dtype],
        "GRAN_K": gran_k,
        "IS_ALIGNED": is_aligned,
    }
    args = _CastArgs(
        x=x.data_ptr(),
        q=q.data_ptr(),
        sf=sf.data_ptr(),
        stride_row=stride_row,
        stride_col=stride_col,
        sf_stride=sf_stride,
        rows=rows,
        cols=cols,
        amax_floor=amax_floor,
        use_ue8m0=use_ue8m0,
    )
    launch_config = LaunchConfig(grid, config["NUM_THREADS"], 0)
    launch.run(jit.load_kernel(kernel, constants), launch_config, args, x.device.index)
    return q


def _cast(x: torch.Tensor, block: tuple[int, int], use_ue8m0: bool, amax_floor: float) -> Pair:
    """What the kernels do with blocks of that shape, in PyTorch operations."""
    rows, cols = x.shape
    height, width = block
    padded = F.pad(x.detach().float(), (0, -cols % width, 0, -rows % height))
    num_blocks = (padded.shape[0] // height, padded.shape[1] // width)
    blocks = padded.view(num_blocks[0], height, num_blocks[1], width)
    q, sf = _quantise(blocks, [1, 3], use_ue8m0, amax_floor)
    return q.view(padded.shape)[:rows, :cols].contiguous(), sf.view(num_blocks)


def _quantise(x: torch.Tensor, dims: list[int], use_ue8m0: bool, amax_floor: float) -> Pair:
    """The formula at the top for float32 `x`; a block runs along `dims`, of size 1 in sf."""
    is_special = ~x.isfinite()
    amax = x.abs().masked_fill_(is_special, 0)
    if dims:
        amax = amax.amax(dims, keepdim=True)
    amax = amax.clamp(min=amax_floor)
    # Division by a Python number would be a multiplication by its reciprocal on a GPU.
    sf = amax / torch.full_like(amax, _FP8_MAX)
    if use_ue8m0:
        sf = ceil_to_ue8m0(sf)
    # A product is never beyond 448 by more than rounding, so the cast needs no saturation.
    q = (x * sf.reciprocal()).to(_FP8)
    q.view(torch.uint8).masked_fill_(is_special, _FP8_NAN)
    return q, sf


def _has_kernel(x: torch.Tensor) -> bool:
    check_gpu(x.device)
    return x.device.type == "cuda" and settings.backend != "reference"


def _check(x: Any, gran_k: int, amax_floor: float) -> None:
    _check_dtype(x)
    if x.dim() != 2:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, expected 2 dimensions; flatten the others with "
            f"x.reshape(-1, x.shape[-1])"
        )
    if gran_k not in _GRANULARITIES:
        raise ValueError(f"gran_k is {gran_k!r}, expected one of {_GRANULARITIES}")
    _check_amax_floor(amax_floor)


def _check_dtype(x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}, expected a torch.Tensor")
    if x.dtype not in _INPUT_TYPES:
        raise TypeError(
            f"x has dtype {x.dtype}, expected torch.float32, torch.bfloat16 or torch.float16; "
            f"x.float() has one of them"
        )


def _check_amax_floor(amax_floor: float) -> None:
    if not _MIN_AMAX_FLOOR <= amax_floor < 2.0**127:
        raise ValueError(
            f"amax_floor is {amax_floor!r}, expected {_MIN_AMAX_FLOOR:.3g} to 2**127, so that "
            f"scales are normal float32 numbers; {AMAX_FLOOR} is the default"
        )
