"""FP8 matrix multiplication with fine-grained scales for NVIDIA Hopper.

    import torch, deep_gemm
    a = deep_gemm.per_token_cast_to_fp8(torch.randn(64, 512), use_ue8m0=False)
    b = deep_gemm.per_block_cast_to_fp8(torch.randn(256, 512), use_ue8m0=False)
    d = torch.empty(64, 256, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(a, b, d)  # d = a @ b.T

Importing makes no CUDA call, starts no process and touches no disk.
"""

from typing import TYPE_CHECKING, NoReturn

from deep_gemm import jit, jit_kernels, legacy, testing, utils
from deep_gemm.checks import can_run
from deep_gemm.gemm import fp8_gemm_nn, fp8_gemm_nt, fp8_gemm_tn, fp8_gemm_tt
from deep_gemm.legacy import gemm_fp8_fp8_bf16_nt
from deep_gemm.plan import make_plan
from deep_gemm.runtime import (
    get_backend,
    get_num_sms,
    get_pdl,
    get_tc_util,
    init,
    set_backend,
    set_block_size_multiple_of,
    set_ignore_compile_dims,
    set_num_sms,
    set_pdl,
    set_tc_util,
)
from deep_gemm.testing import bench, bench_kineto, calc_diff
from deep_gemm.types import KernelConfig
from deep_gemm.unavailable import (
    SymmBuffer,
    bf16_mega_moe,
    fp8_fp4_mega_moe,
    get_symm_buffer_for_mega_moe,
    m_grouped_bf16_gemm_nn_contiguous,
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_fp8_fp4_gemm_nn_contiguous,
    m_grouped_fp8_fp4_gemm_nt_contiguous,
    transform_weights_for_mega_moe,
)
