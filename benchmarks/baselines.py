"""What our kernels are compared with: PyTorch's own FP8 and bf16 products, and the test data."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import deep_gemm
from benchmarks.cases import Case

FP8_MAX = 448.0

Pair = tuple[torch.Tensor, torch.Tensor]


class Weight:
    """A random normal weight [n, k]: bf16, in 128x128 blocks, and with one scale per tensor."""

    def __init__(self, n: int, k: int, device: str) -> None:
        self.bf16 = torch.randn(n, k, dtype=torch.bfloat16, device=device)
        self.blocks: Pair = deep_gemm.per_block_cast_to_fp8(self.bf16, False)
        self.tensor = per_tensor_cast_to_fp8(self.bf16)


class Inputs:
    """Operands of one case, quantised in each of the ways that are compared, and our output."""

    def __init__(self, case: Case, weight: Weight) -> None:
        device = weight.bf16.device
        self.case = case
        self.weight = weight
        self.bf16 = torch.randn(case.m, case.k, dtype=torch.bfloat16, device=device)
        self.rows: Pair = deep_gemm.per_token_cast_to_fp8(self.bf16, False)
        self.tensor = per_tensor_cast_to_fp8(self.bf16)
        self.d = torch.empty(case.m, case.n, dtype=torch.bfloat16, device=device)

    def ours(self) -> None:
        deep_gemm.fp8_gemm_nt(self.rows, self.weight.blocks, self.d)

    def scaled_mm_tensor(self) -> torch.Tensor:
        """cuBLASLt with one scale per tensor and fast accumulation: no fine-grained scaling."""
        (a, sfa), (b, sfb) = self.tensor, self.weight.tensor
        return torch._scaled_mm(a, b.T, sfa, sfb, out_dtype=torch.bfloat16, use_fast_accum=True)

    def scaled_mm_block(self) -> Callable[[], torch.Tensor] | None:
        """cuBLASLt with our scaling on our data, or None where torch or cuBLASLt refuses it."""
        if not hasattr(F, "scaled_mm"):
            return None
        (a, sfa), (b, sfb) = self.rows, self.weight.blocks
        sfa = _mn_major(sfa, len(sfa))
        sfb = _mn_major(sfb.T, -(-sfb.shape[1] // 4) * 4, padded=True)
        kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128

        def call() -> torch.Tensor:
            return F.scaled_mm(a, b.T, sfa, kinds[0], sfb, kinds[1], output_dtype=torch.bfloat16)

        try:
            call()
        except (RuntimeError, ValueError, NotImplementedError):
            return None
        return call


def per_tensor_cast_to_fp8(x: torch.Tensor) -> Pair:
    """(float8_e4m3fn of the shape of x, float32 scalar scale)."""
    scale = x.abs().amax().float() / FP8_MAX
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def _mn_major(scales: torch.Tensor, stride: int, padded: bool = False) -> torch.Tensor:
    """A copy whose first dimension is contiguous; `padded` extends that dimension to `stride`."""
    rows, columns = scales.shape
    out = torch.zeros(columns, stride, device=scales.device).T
    out[:rows] = scales
    return out if padded else out[:rows]
