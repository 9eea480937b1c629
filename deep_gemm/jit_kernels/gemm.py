"""`deep_gemm.jit_kernels.gemm` of 2025: the dense GEMM and its configuration as plain numbers."""

from __future__ import annotations

from deep_gemm.jit_kernels.utils import get_num_sms
from deep_gemm.legacy import gemm_fp8_fp8_bf16_nt
from deep_gemm.plan import make_plan
from deep_gemm.types import BLOCK_K, Problem

__all__ = ["gemm_fp8_fp8_bf16_nt", "get_best_configs", "get_num_sms"]

_SWIZZLE_BYTES = 128
_BLOCK_N_PADDING = 0


def get_best_configs(
    m: int,
    n: int,
    k: int,
    num_groups: int,
    num_sms: int,
    is_grouped_contiguous: bool = False,
    is_grouped_masked: bool = False,
    is_fp32_out: bool = False,
    is_wgrad: bool = False,
) -> tuple[int, int, int, int, tuple[int, bool], tuple[int, int, int]]:
    """`make_plan` of a dense GEMM of contiguous tensors, in the form of 2025.

    Returns (CTAs launched, block_m, block_n, pipeline stages, (CTAs that share a load by multicast,
    whether they share A), (shared memory in bytes, swizzle of D in bytes, padding of block_n)).
    Raises NotImplementedError for grouped problems and weight gradients.
    """
    if num_groups != 1 or is_grouped_contiguous or is_grouped_masked or is_fp32_out or is_wgrad:
        raise NotImplementedError(
            f"get_best_configs got num_groups={num_groups}, {is_grouped_contiguous=}, "
            f"{is_grouped_masked=}, {is_fp32_out=}, {is_wgrad=}; expected a dense bfloat16 GEMM "
            f"(num_groups=1, all flags False) in this version"
        )
    num_k_blocks = -(-k // BLOCK_K)
    plan = make_plan(Problem("dense", m, n, k, "cuda:0", k, k, n, (num_k_blocks, 1)), num_sms)
    kernel, launch = plan.kernel, plan.launch
    return (
        launch.grid,
        kernel.block_m,
        kernel.block_n,
        kernel.num_stages,
        (kernel.cluster_size, kernel.cluster_n > 1),
        (launch.smem_bytes, _SWIZZLE_BYTES, _BLOCK_N_PADDING),
    )
