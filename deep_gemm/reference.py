"""The reference backend: what the kernels compute, in PyTorch operations, on any device.

    D[m, n] = bf16( sum over k-blocks b of SFA[m, b] * SFB[n / 128, b] * (A[m, b] . B[n, b]) )

where A[m, b] are the 128 channels of block b. Sums are float32; the tensor core's own sum of a
block keeps about 14 bits. A row of D depends on nothing but that row of A, its scales, and B.
"""

from __future__ import annotations

import torch

from deep_gemm.types import BLOCK_K

_MAX_PARTIAL = 1 << 24  # elements of a temporary: rows of D are made in bands of that size


@torch.no_grad()  # parameters may be operands, and d is written in place
def gemm_nt(
    a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor, d: torch.Tensor
) -> None:
    """d = A @ B.T for checked operands.

    Args:
        a, b: float8_e4m3fn [m, k] and [n, k].
        sfa, sfb: float32 [m, ceil(k / 128)] and [ceil(n / 128), ceil(k / 128)].
        d: [m, n] of any float dtype, overwritten.
    """
    n = len(b)
    sfb = _per_row(sfb, n)
    band = max(1, _MAX_PARTIAL // max(1, n))
    for a_band, sfa_band, d_band in zip(a.split(band), sfa.split(band), d.split(band), strict=True):
        accum = torch.zeros(d_band.shape, dtype=torch.float32, device=d.device)
        for block in range(sfb.shape[1]):
            channels = slice(block * BLOCK_K, (block + 1) * BLOCK_K)
            partial = a_band[:, channels].float() @ b[:, channels].float().t()
            accum.addcmul_(partial, sfa_band[:, block, None] * sfb[None, :, block])
        d_band.copy_(accum)


def gemm_grouped(
    kind: str,
    a: torch.Tensor,
    sfa: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    alignment: int,
    zero_padding: bool,
) -> None:
    """The grouped calls for checked operands; reads the layout's values on the host.

    Args:
        kind: "masked" (a [G, m_max, k], d [G, m_max, n]), "contiguous" or "psum" ([m, ...]).
        b, sfb: weights [G, n, k] and their scales.
        grouped_layout: rows of each group, group of each row, or end row of each group.
        alignment: rows of a block that belongs to one group.
        zero_padding: write zeros to padding rows of blocks that have other rows.
    """
    if kind == "masked":
        for group, rows in enumerate(grouped_layout.clamp(0, a.shape[1]).tolist()):
            gemm_nt(a[group, :rows], sfa[group, :rows], b[group], sfb[group], d[group, :rows])
        return
    group_of_row, is_zero = _rows_of_groups(kind, grouped_layout, len(a), len(b), alignment)
    for group in group_of_row.unique().tolist():
        if group < 0:
            continue
        rows = (group_of_row == group).nonzero().flatten()
        part = torch.empty(len(rows), d.shape[1], dtype=d.dtype, device=d.device)
        a_rows = a.view(torch.uint8)[rows].view(a.dtype)  # not every torch indexes FP8
        gemm_nt(a_rows, sfa[rows], b[group], sfb[group], part)
        d[rows] = part
    if zero_padding:
        d[is_zero] = 0


def _rows_of_groups(
    kind: str, grouped_layout: torch.Tensor, m: int, num_groups: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The group of each row, -1 where there is none, and which rows are padding of a used block."""
    alignment = min(alignment, max(m, 1))  # more makes no difference
    num_blocks = -(-m // alignment)
    groups = torch.full((num_blocks * alignment,), -1, device=grouped_layout.device)
    if kind == "psum":
        begin = 0
        for group, end in enumerate(grouped_layout.clamp(0, m).tolist()):
            groups[begin:end] = group  # empty where end is not beyond begin
            begin = -(-end // alignment) * alignment
    else:
        groups[:m] = grouped_layout
    groups = groups.view(num_blocks, alignment)
    is_valid = (groups >= 0) & (groups < num_groups)
    is_used = is_valid.any(1, keepdim=True)
    if kind == "contiguous":  # a block belongs to the group of its first valid row
        groups = groups.gather(1, is_valid.int().argmax(1, keepdim=True)).expand_as(groups)
    group_of_row = torch.where(is_valid, groups, -1).flatten()[:m]
    return group_of_row, (is_used & ~is_valid).flatten()[:m]


def gemm_nt_f64(
    a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor
) -> torch.Tensor:
    """A @ B.T in float64 [m, n], from the operands of `gemm_nt`: the oracle of the tests."""
    return dequantize_a(a, sfa) @ dequantize_b(b, sfb).t()


def dequantize_a(
    a: torch.Tensor, sfa: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """FP8 [m, k] times its scales, one per row and 128 channels [m, ceil(k / 128)], in `dtype`."""
    k = a.shape[1]
    return a.to(dtype) * sfa.to(dtype).repeat_interleave(BLOCK_K, dim=1)[:, :k]


def dequantize_b(
    b: torch.Tensor, sfb: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """FP8 [n, k] times its scales, one per 128 x 128 [ceil(n / 128), ceil(k / 128)], in `dtype`."""
    return dequantize_a(b, _per_row(sfb, len(b)), dtype)


def _per_row(sfb: torch.Tensor, n: int) -> torch.Tensor:
    return sfb.repeat_interleave(BLOCK_K, dim=0)[:n]
