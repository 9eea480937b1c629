"""The 2025 module layout that clients still import from; every name is defined elsewhere."""

from deep_gemm.jit_kernels.gemm import gemm_fp8_fp8_bf16_nt, get_best_configs
from deep_gemm.jit_kernels.utils import get_num_sms, set_num_sms

__all__ = ["gemm_fp8_fp8_bf16_nt", "get_best_configs", "get_num_sms", "set_num_sms"]
