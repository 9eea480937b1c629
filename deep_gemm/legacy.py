"""The names of 2025, still called by clients, over today's functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deep_gemm.gemm import fp8_gemm_nt
from deep_gemm.grouped_gemm import m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked

__all__ = [
    "gemm_fp8_fp8_bf16_nt",
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
]


def gemm_fp8_fp8_bf16_nt(
    lhs: Sequence[torch.Tensor], rhs: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """out = lhs @ rhs.T, the 2025 name of `fp8_gemm_nt(a=lhs, b=rhs, d=out)`; same errors.

    `lhs` is (E4M3 [m, k], float32 [m, ceil(k/128)]), `rhs` is (E4M3 [n, k], float32 [ceil(n/128),
    ceil(k/128)]), tuples or lists; `out` is bfloat16 [m, n], overwritten.
    """
    fp8_gemm_nt(lhs, rhs, out)


def m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(
    lhs: Sequence[torch.Tensor],
    rhs: Sequence[torch.Tensor],
    out: torch.Tensor,
    m_indices: torch.Tensor | None = None,
    *,
    grouped_layout: torch.Tensor | None = None,
) -> None:
    """The 2025 name of `m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, out, m_indices)`; same errors.

    `lhs` is (E4M3 [m, k], float32 [m, ceil(k/128)]), `rhs` is (E4M3 [groups, n, k], float32
    [groups, ceil(n/128), ceil(k/128)]); `out` is bfloat16 [m, n], `m_indices` int32 [m].
    """
    m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, out, grouped_layout, m_indices=m_indices)


def m_grouped_gemm_fp8_fp8_bf16_nt_masked(
    lhs: Sequence[torch.Tensor],
    rhs: Sequence[torch.Tensor],
    out: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
) -> None:
    """The 2025 name of `m_grouped_fp8_gemm_nt_masked(lhs, rhs, out, masked_m, expected_m)`; same
    errors.

    `lhs` is (E4M3 [groups, m_max, k], float32 [groups, m_max, ceil(k/128)]), `rhs` as in the
    contiguous form; `out` is bfloat16 [groups, m_max, n], `masked_m` int32 [groups].
    """
    m_grouped_fp8_gemm_nt_masked(lhs, rhs, out, masked_m, expected_m)
