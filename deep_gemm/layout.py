"""Layouts of scale factors: MN-major and TMA-aligned, packed UE8M0, and the grouped alignment.

The kernels load scales of A with TMA, along rows ("MN-major"): as [mn, k-blocks] they have strides
(1, align(mn, 4)), since TMA wants each column to start at a multiple of 16 bytes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from deep_gemm import jit, launch
from deep_gemm.checks import check_gpu
from deep_gemm.config import settings
from deep_gemm.types import BLOCK_K, LaunchConfig

__all__ = [
    "get_col_major_tma_aligned_tensor",
    "get_k_alignment_for_contiguous_layout",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "pack_ue8m0_to_int",
    "set_mk_alignment_for_contiguous_layout",
    "transform_sf_into_required_layout",
    "unpack_ue8m0_from_int",
]

_TMA_BYTES = 16  # of addresses and strides
_ALIGNED = _TMA_BYTES // 4  # the same in scales
_MANTISSA_BITS = 23  # of float32
_TRANSPOSE = {"NUM_THREADS": 256, "TILE_MN": 64, "TILE_K": 32}


def get_tma_aligned_size(x: int, elem_size: int) -> int:
    """The smallest size >= `x` for which that many elements of `elem_size` bytes fill 16 bytes.

    Raises ValueError if `elem_size` does not divide 16 or `x` is negative.
    """
    if elem_size not in (1, 2, 4, 8, 16):
        raise ValueError(f"elem_size is {elem_size}, expected a divisor of {_TMA_BYTES} (bytes)")
    if x < 0:
        raise ValueError(f"x is {x}, expected 0 or more")
    multiple = _TMA_BYTES // elem_size
    return -(-x // multiple) * multiple


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """Scales in the layout that the kernels load: `sf` itself if it has it, else a copy.

    Args:
        sf: float32 [mn, k-blocks] or [groups, mn, k-blocks], any mn and any strides. Strides of
            dimensions of size 1 do not matter.

    Returns:
        The same shape and values with strides (1, align(mn, 4)), preceded in 3-D by that of a dense
        group. Elements between mn and align(mn, 4) are never written or read.

    On Hopper GPUs the copy is one launch of a transposing kernel. Raises TypeError (not a float32
    tensor), ValueError (rank), NotImplementedError (another GPU).
    """
    _check_scales("sf", sf, (2, 3))
    return sf if _is_native(sf) else _to_native(sf)


def get_col_major_tma_aligned_tensor(x: torch.Tensor) -> torch.Tensor:
    """The 2025 name of `get_mn_major_tma_aligned_tensor`."""
    return get_mn_major_tma_aligned_tensor(x)


def native_sfa(sfa: torch.Tensor, m: int, k: int) -> torch.Tensor:
    """Scales of A, float32 [m, ceil(k / 128)] or of groups, in the layout that the kernels load.

    The step between `check_dense`, which it trusts, and the plan: returns `sfa` itself where that
    has the layout. Where not, logs (once, at debug level) that scales had to be copied.
    """
    if is_native_sfa(sfa, m, k):
        return sfa
    _log_copy_once()
    return _to_native(sfa)


def is_native_sfa(sfa: torch.Tensor, m: int, k: int) -> bool:
    """Whether checked scales of A have the layout that the kernels load."""
    if sfa.dim() == 3:
        return _is_native(sfa)
    return _is_native_2d(sfa.stride(), m, -(-k // BLOCK_K)) and sfa.data_ptr() % _TMA_BYTES == 0


def native_sfa_stride(sfa: torch.Tensor, m: int, k: int) -> int:
    """From one k-block to the next, of checked scales of A or of their native copy; of groups with
    a single k-block, from one group to the next."""
    if is_native_sfa(sfa, m, k):
        if k > BLOCK_K:
            return sfa.stride(-1)
        if sfa.dim() == 3 and sfa.shape[0] > 1:
            return sfa.stride(0)
    return get_tma_aligned_size(m, 4)


def empty_native(mn: int, num_k_blocks: int, device: torch.device) -> torch.Tensor:
    """Uninitialised float32 scales [mn, num_k_blocks] in the layout that the kernels load."""
    strides = (1, get_tma_aligned_size(mn, 4))
    return torch.empty_strided((mn, num_k_blocks), strides, dtype=torch.float32, device=device)


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: Sequence[int],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scales as the Hopper kernels take them.

    Args:
        sf: float32 [ceil(mn / gran_mn), ceil(k / gran_k)], preceded by `num_groups` if given.
        mn, k: size of the data that `sf` scales.
        recipe: (gran_m, gran_n, gran_k), of which `is_sfa` selects gran_m (True) or gran_n (False),
            or (gran_mn, gran_k) without `is_sfa`.
        disable_ue8m0_cast, psum_layout: accepted for compatibility; on Hopper scales stay float32,
            and rows that a prefix-sum layout leaves out are transposed like the others.

    Returns:
        Granularity (1, 128): MN-major and TMA-aligned, see `get_mn_major_tma_aligned_tensor`;
        (128, 128): `sf` itself, which is contiguous or the transposed view of contiguous scales.

    Raises TypeError (dtype), ValueError (shape, strides, recipe), NotImplementedError (other
    granularities, packed scales, other GPUs than Hopper).
    """
    gran_mn, gran_k = _granularity(recipe, is_sfa)
    if (gran_mn, gran_k) not in ((1, 128), (128, 128)):
        raise NotImplementedError(
            f"recipe {tuple(recipe)} means scales per {gran_mn} x {gran_k}, expected 1 x 128 or "
            f"128 x 128, which Hopper's kernels take; quantise with gran_k = 128"
        )
    if isinstance(sf, torch.Tensor) and sf.dtype == torch.int32:
        raise NotImplementedError(
            "sf has dtype torch.int32 (packed UE8M0, for SM100), expected torch.float32 on Hopper; "
            "unpack_ue8m0_from_int makes it"
        )
    _check_scales("sf", sf, (2 if num_groups is None else 3,))
    expected: tuple[int, ...] = (-(-mn // gran_mn), -(-k // gran_k))
    if num_groups is not None:
        expected = (num_groups, *expected)
    if tuple(sf.shape) != expected:
        groups = "" if num_groups is None else "num_groups, "
        raise ValueError(
            f"sf has shape {tuple(sf.shape)}, expected {expected} = ({groups}ceil(mn / {gran_mn}), "
            f"ceil(k / {gran_k})) for mn = {mn}, k = {k}"
        )
    if gran_mn == 1:
        return get_mn_major_tma_aligned_tensor(sf)
    if not sf.is_contiguous() and not sf.mT.is_contiguous():
        raise ValueError(
            f"sf has strides {sf.stride()} for shape {tuple(sf.shape)}, expected a contiguous "
            f"tensor or the transposed view of one; sf.contiguous() has it"
        )
    return sf


def pack_ue8m0_to_int(x: torch.Tensor) -> torch.Tensor:
    """Pack powers of two, float32 [..., 4 * j], as their exponents into int32 [..., j].

    The first scale lands in the lowest byte; a byte is the biased exponent of float32, which is
    UE8M0, with 255 for NaN. On a CPU other values than powers of two are a ValueError; elsewhere
    their mantissa is lost, since looking would stop the GPU.
    """
    _check_scales("x", x, None)
    if x.dim() == 0 or x.shape[-1] % 4:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, expected a last dimension that is a multiple of 4; "
            f"get_mn_major_tma_aligned_packed_ue8m0_tensor pads"
        )
    packed = _pack_padded(x)
    if x.device.type == "cpu":
        lost = (unpack_ue8m0_from_int(packed) != x) & x.isfinite() & (x != 0)
        if lost.any():
            raise ValueError(
                f"x has values that are no power of two, such as {x[lost][0].item()!r}, expected "
                f"powers of two only; ceil_to_ue8m0 makes them"
            )
    return packed


def unpack_ue8m0_from_int(packed_sf: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_ue8m0_to_int`: int32 [..., j] -> float32 [..., 4 * j].

    A byte e stands for 2**(e - 127), and 255 for NaN.
    """
    if not isinstance(packed_sf, torch.Tensor) or packed_sf.dtype != torch.int32:
        got = getattr(packed_sf, "dtype", type(packed_sf).__name__)
        raise TypeError(f"packed_sf is {got}, expected a torch.int32 tensor")
    exponents = packed_sf.clone(memory_format=torch.contiguous_format).view(torch.uint8).int()
    # At the ends of the range, 2**-127 and NaN, float32 has a bit of mantissa.
    is_end = (exponents == 0) | (exponents == 255)
    bits = (exponents << _MANTISSA_BITS) | (is_end.int() << (_MANTISSA_BITS - 1))
    return bits.view(torch.float32)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: torch.Tensor, psum_layout: torch.Tensor | None = None
) -> torch.Tensor:
    """Scales packed four to an int32 along k, MN-major and TMA-aligned, as SM100 GPUs take them.

    Args:
        sf: float32 powers of two, [mn, k-blocks] or [groups, mn, k-blocks]. Only exponents are
            kept, and no value is checked: padding rows may hold anything.
        psum_layout: accepted for compatibility; rows that it leaves out are packed, too.

    Returns:
        int32 [..., mn, ceil(k-blocks / 4)] with strides (1, align(mn, 4)); missing k-blocks are 0.
    """
    _check_scales("sf", sf, (2, 3))
    return _aligned_copy(_pack_padded(sf))


def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: torch.Tensor,
    grouped_layout: torch.Tensor | None,
    ks_cpu: Sequence[int],
    gran_k: int,
    k_alignment: int,
    use_psum_layout: bool = False,
) -> torch.Tensor:
    """As `get_mn_major_tma_aligned_packed_ue8m0_tensor`, for scales of groups along k.

    Args:
        sf: float32 powers of two [sum of K_g / gran_k, mn].
        grouped_layout: the sizes K_g on the device; accepted for compatibility, `ks_cpu` has them.
        ks_cpu: the sizes K_g, multiples of `k_alignment` and of `gran_k`; 0 is allowed.
        gran_k: channels of a scale.
        use_psum_layout: must be False; prefix sums are for SM100.

    Returns:
        int32 [sum of ceil(K_g / (4 * gran_k)), mn] with strides (align(mn, 4), 1).
    """
    if use_psum_layout:
        raise NotImplementedError(
            "use_psum_layout is True, expected False: scales of prefix-sum groups along k are for "
            "SM100 GPUs; pass the group sizes as ks_cpu"
        )
    _check_scales("sf", sf, (2,))
    for k in ks_cpu:
        if k < 0 or k % k_alignment or k % gran_k:
            raise ValueError(
                f"ks_cpu has {k}, expected multiples of k_alignment = {k_alignment} and of "
                f"gran_k = {gran_k}; pad the group"
            )
    rows = [k // gran_k for k in ks_cpu]
    if sum(rows) != len(sf):
        raise ValueError(
            f"sf has shape {tuple(sf.shape)}, expected {sum(rows)} rows = sum(ks_cpu) / gran_k for "
            f"gran_k = {gran_k}"
        )
    groups = [_pack_padded(group.mT) for group in sf.split(rows)]
    mn = sf.shape[1]
    packed = torch.cat(groups, dim=1) if groups else sf.new_empty((mn, 0), dtype=torch.int32)
    return _aligned_copy(packed).mT


def get_mk_alignment_for_contiguous_layout() -> int:
    """Rows (for weight gradients: channels) of a block that belongs to one group; 128 at first."""
    return settings.mk_alignment


def set_mk_alignment_for_contiguous_layout(alignment: int) -> None:
    """Set what `get_mk_alignment_for_contiguous_layout` returns.

    Prefix-sum layouts take any alignment from 1 up, group ids per row a multiple of 16.
    """
    if not isinstance(alignment, int) or isinstance(alignment, bool):
        raise TypeError(f"alignment is {alignment!r}, expected an int")
    if alignment <= 0:
        raise ValueError(f"alignment is {alignment}, expected 1 or more; 128 is upstream's")
    settings.mk_alignment = alignment


def get_m_alignment_for_contiguous_layout() -> int:
    """The 2025 name of `get_mk_alignment_for_contiguous_layout`."""
    return settings.mk_alignment


def get_k_alignment_for_contiguous_layout() -> int:
    """Another name of `get_mk_alignment_for_contiguous_layout`."""
    return settings.mk_alignment


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    """The alignment that suits the kernels best, for groups of about `expected_m` rows.

    Tiles begin and end where groups do, so padding only costs: 16, the least that both layouts
    take. 128, which every version takes, where nothing is known about the groups.
    """
    return 128 if expected_m is None else 16


def _is_native(sf: torch.Tensor) -> bool:
    *groups, mn, num_k_blocks = sf.shape
    *group_strides, stride_mn, stride_k = sf.stride()
    if sf.numel() == 0:
        return True
    if sf.data_ptr() % _TMA_BYTES or not _is_native_2d((stride_mn, stride_k), mn, num_k_blocks):
        return False
    if not groups or groups[0] == 1:
        return True
    if num_k_blocks == 1:
        return group_strides[0] >= mn and group_strides[0] % _ALIGNED == 0
    return group_strides[0] == num_k_blocks * stride_k


def _is_native_2d(strides: Sequence[int], mn: int, num_k_blocks: int) -> bool:
    stride_mn, stride_k = strides
    return (mn == 1 or stride_mn == 1) and (
        num_k_blocks == 1 or (stride_k >= mn and stride_k % _ALIGNED == 0)
    )


class _TransposeArgs(ctypes.Structure):
    """`struct transpose_scales_args` of the kernel."""

    _fields_ = (
        ("sf", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("stride_group", ctypes.c_int64),
        ("stride_mn", ctypes.c_int64),
        ("stride_k", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("mn", ctypes.c_uint32),
        ("num_k_blocks", ctypes.c_uint32),
    )


def _to_native(sf: torch.Tensor) -> torch.Tensor:
    check_gpu(sf.device)
    if sf.device.type != "cuda" or settings.backend == "reference" or sf.numel() == 0:
        return _aligned_copy(sf)
    out = _empty_native_like(sf)
    mn, num_k_blocks = sf.shape[-2:]
    num_groups = sf.shape[0] if sf.dim() == 3 else 1
    args = _TransposeArgs(
        sf=sf.data_ptr(),
        out=out.data_ptr(),
        stride_group=sf.stride(0) if sf.dim() == 3 else 0,
        stride_mn=sf.stride(-2),
        stride_k=sf.stride(-1),
        out_stride=out.stride(-1),
        mn=mn,
        num_k_blocks=num_k_blocks,
    )
    tiles = -(-mn // _TRANSPOSE["TILE_MN"]) * -(-num_k_blocks // _TRANSPOSE["TILE_K"])
    config = LaunchConfig(num_groups * tiles, _TRANSPOSE["NUM_THREADS"], 0)
    kernel = jit.load_kernel("transpose_scales", _TRANSPOSE)
    launch.run(kernel, config, args, sf.device.index)
    return out


def _aligned_copy(sf: torch.Tensor) -> torch.Tensor:
    return _empty_native_like(sf).copy_(sf)


def _empty_native_like(sf: torch.Tensor) -> torch.Tensor:
    mn, num_k_blocks = sf.shape[-2:]
    stride_k = get_tma_aligned_size(mn, 4)
    strides = (num_k_blocks * stride_k, 1, stride_k)[-sf.dim() :]
    return torch.empty_strided(sf.shape, strides, dtype=sf.dtype, device=sf.device)


def _pack_padded(sf: torch.Tensor) -> torch.Tensor:
    """Biased exponents, int32 [..., ceil(k-blocks / 4)]; missing k-blocks become 0."""
    exponents = (sf.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
    exponents = F.pad(exponents, (0, -sf.shape[-1] % 4))
    quads = exponents.reshape(*exponents.shape[:-1], exponents.shape[-1] // 4, 4)
    return quads.clone(memory_format=torch.contiguous_format).view(torch.int32).squeeze(-1)


def _granularity(recipe: Any, is_sfa: Any) -> tuple[int, int]:
    if not isinstance(recipe, (tuple, list)) or len(recipe) not in (2, 3):
        raise ValueError(
            f"recipe is {recipe!r}, expected (gran_m, gran_n, gran_k) or (gran_mn, gran_k)"
        )
    if (len(recipe) == 3) != (is_sfa is not None):
        raise ValueError(
            f"is_sfa is {is_sfa!r} with recipe {tuple(recipe)}, expected True or False with three "
            f"sizes, to choose gran_m or gran_n, and None with two"
        )
    gran_mn = recipe[0] if is_sfa is None or is_sfa else recipe[1]
    return gran_mn, recipe[-1]


def _check_scales(name: str, sf: Any, ranks: tuple[int, ...] | None) -> None:
    if not isinstance(sf, torch.Tensor):
        raise TypeError(f"{name} is a {type(sf).__name__}, expected a torch.Tensor")
    if sf.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {sf.dtype}, expected torch.float32")
    if ranks is not None and sf.dim() not in ranks:
        expected = " or ".join(map(str, ranks))
        raise ValueError(f"{name} has shape {tuple(sf.shape)}, expected {expected} dimensions")


@functools.cache
def _log_copy_once() -> None:
    logging.getLogger("deep_gemm").debug(
        "scales of A are copied before each GEMM; per_token_cast_to_fp8 returns them aligned"
    )
