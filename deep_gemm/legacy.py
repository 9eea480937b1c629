"""The names of 2025, still called by clients, over today's functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deep_gemm.gemm import fp8_gemm_nt

__all__ = ["gemm_fp8_fp8_bf16_nt"]


def gemm_fp8_fp8_bf16_nt(
    lhs: Sequence[torch.Tensor], rhs: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """out = lhs @ rhs.T, the 2025 name of `fp8_gemm_nt(a=lhs, b=rhs, d=out)`; same errors.

    `lhs` is (E4M3 [m, k], float32 [m, ceil(k/128)]), `rhs` is (E4M3 [n, k], float32 [ceil(n/128),
    ceil(k/128)]), tuples or lists; `out` is bfloat16 [m, n], overwritten.
    """
    fp8_gemm_nt(lhs, rhs, out)
