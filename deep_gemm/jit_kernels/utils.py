"""`deep_gemm.jit_kernels.utils` of 2025."""

from deep_gemm.layout import (
    get_col_major_tma_aligned_tensor,
    get_m_alignment_for_contiguous_layout,
    get_tma_aligned_size,
)
from deep_gemm.runtime import get_num_sms, set_num_sms
from deep_gemm.utils.math import ceil_div

__all__ = [
    "ceil_div",
    "get_col_major_tma_aligned_tensor",
    "get_m_alignment_for_contiguous_layout",
    "get_num_sms",
    "get_tma_aligned_size",
    "set_num_sms",
]
