"""`deep_gemm.jit_kernels.gemm` of 2025: the dense GEMM and its configuration as plain numbers."""

from __future__ import annotations

from dataclasses import replace

from deep_gemm.jit_kernels.utils import get_num_sms
from deep_gemm.legacy import gemm_fp8_fp8_bf16_nt
from deep_gemm.plan import make_plan
from deep_gemm.types import BLOCK_K, Problem

__all__ = ["gemm_fp8_fp8_bf16_nt", "get_best_configs", "get_num_sms"]

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
    """`make_plan` of contiguous tensors, in the form of 2025.

    `m` is that of all groups in the contiguous layout, of one group in the masked one.
    Returns (CTAs launched, block_m, block_n, pipeline stages, (CTAs that share a load by multicast,
    whether they share A), (shared memory in bytes, swizzle of D in bytes, padding of block_n)).
    Raises NotImplementedError for weight gradients, ValueError for groups without a layout.
    """
    if is_fp32_out or is_wgrad:
        raise NotImplementedError(
            f"get_best_configs got {is_fp32_out=}, {is_wgrad=}; expected a bfloat16 GEMM (both "
            f"False) in this version"
        )
    if (is_grouped_contiguous and is_grouped_masked) or (
        num_groups > 1 and not (is_grouped_contiguous or is_grouped_masked)
    ):
        raise ValueError(
            f"get_best_configs got num_groups={num_groups}, {is_grouped_contiguous=}, "
            f"{is_grouped_masked=}; expected one of the two layouts with several groups"
        )
    num_k_blocks = -(-k // BLOCK_K)
    problem = Problem("dense", m, n, k, "cuda:0", k, k, n, (num_k_blocks, 1))
    if is_grouped_contiguous:
        problem = replace(
            problem, kind="contiguous", num_groups=num_groups, expected_m=-(-m // num_groups)
        )
    elif is_grouped_masked:
        problem = replace(problem, kind="masked", num_groups=num_groups, expected_m=m)
    plan = make_plan(problem, num_sms)
    kernel, launch = plan.kernel, plan.launch
    return (
        launch.grid,
        kernel.block_m,
        kernel.block_n,
        kernel.num_stages,
        (kernel.cluster_size, kernel.cluster_n > 1),
        (launch.smem_bytes, kernel.slab_n * 2, _BLOCK_N_PADDING),
    )
