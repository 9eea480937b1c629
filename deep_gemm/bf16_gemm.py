"""BF16 GEMM, dense and grouped, by torch's matmul: right, but not kernels of ours yet.

Sums are float32 and are rounded once, to the dtype of D. (With bfloat16 D on CUDA, torch's setting
`allow_bf16_reduced_precision_reduction` lets cuBLAS round the parts of a sum that it splits.)

Grouped calls neither synchronise nor read values on the host, so CUDA graphs can hold them: rows of
no group are computed, too, and thrown away. On CPU tensors, groups are a loop over host values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deep_gemm import bf16_checks, bf16_matmul
from deep_gemm.checks import check_compiled_dims
from deep_gemm.config import settings

_FP8 = torch.float8_e4m3fn
_BF16 = (torch.bfloat16,)
_BF16_OR_FP8 = (torch.bfloat16, _FP8)


def bf16_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "nk",
) -> None:
    """D = A @ B.T, or C + A @ B.T, in BF16. Runs torch's matmul (cuBLAS), not a kernel of ours.

    Args:
        a, b: bfloat16 [m, k] and [n, k], any strides.
        d: bfloat16 or float32 [m, n], rows contiguous. m = 0 or n = 0: nothing happens; k = 0: D
            becomes C, or zeros.
        c: what the product is added to, with shape and dtype of `d`: a tensor of its own, or `d`.
        compiled_dims: accepted for compatibility, letters out of "mnk", no effect.

    Raises ValueError or TypeError for what does not fit; the text says what, why and what to do.
    """
    check_compiled_dims(compiled_dims)
    _dense("nt", a, b, d, c, _BF16)


def bf16_gemm_nn(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "nk",
) -> None:
    """D = (C +) A @ B: `bf16_gemm_nt` with B as [k, n]; torch's matmul."""
    check_compiled_dims(compiled_dims)
    _dense("nn", a, b, d, c, _BF16)


def bf16_gemm_tn(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "mn",
) -> None:
    """D = (C +) A.T @ B: `bf16_gemm_nt` with A as [k, m] and B as [k, n]; torch's matmul."""
    check_compiled_dims(compiled_dims)
    _dense("tn", a, b, d, c, _BF16)


def bf16_gemm_tt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "mn",
) -> None:
    """D = (C +) A.T @ B.T: `bf16_gemm_nt` with A as [k, m]; torch's matmul."""
    check_compiled_dims(compiled_dims)
    _dense("tt", a, b, d, c, _BF16)


def cublaslt_gemm_nt(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None
) -> None:
    """D = (C +) A @ B.T by torch's matmul (cuBLAS): `bf16_gemm_nt`, which may also take FP8 data.

    `a` and `b` are both bfloat16, or both float8_e4m3fn without scales. FP8 runs
    `torch._scaled_mm` with unit scales on Hopper where cuBLASLt takes the operands (K-major, n and
    k multiples of 16, 256-byte aligned, no C). Else it is converted to bfloat16, which is exact.
    """
    _dense("nt", a, b, d, c, _BF16_OR_FP8)


def cublaslt_gemm_nn(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None
) -> None:
    """D = (C +) A @ B: `cublaslt_gemm_nt` with B as [k, n]; torch's matmul."""
    _dense("nn", a, b, d, c, _BF16_OR_FP8)


def cublaslt_gemm_tn(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None
) -> None:
    """D = (C +) A.T @ B: `cublaslt_gemm_nt` with A as [k, m] and B as [k, n]; torch's matmul."""
    _dense("tn", a, b, d, c, _BF16_OR_FP8)


def cublaslt_gemm_tt(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None
) -> None:
    """D = (C +) A.T @ B.T: `cublaslt_gemm_nt` with A as [k, m]; torch's matmul."""
    _dense("tt", a, b, d, c, _BF16_OR_FP8)


def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor | None = None,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    *,
    m_indices: torch.Tensor | None = None,
) -> None:
    """D[rows of g] = A[rows of g] @ B[g].T for each group g. Runs torch's matmul, not our kernel.

    On Hopper with bfloat16 D, k and n multiples of 8 and torch >= 2.8 this is `torch._grouped_mm`
    around a sort of the rows; else one product per block with a copy of its weight: right but slow.

    Args:
        a, b: bfloat16 [m, k] and [groups, n, k], any strides.
        d: bfloat16 or float32 [m, n], rows contiguous. m = 0: nothing happens.
        grouped_layout: int32 [m], the group of each row, -1 for none. A block is as many rows as
            `get_mk_alignment_for_contiguous_layout` says and belongs to one group.
        compiled_dims: accepted for compatibility, letters out of "mnk", no effect.
        use_psum_layout: `grouped_layout` is int32 [groups] instead, ascending: the row at which
            each group ends. It begins where a block does, at or after the end of the one before.
        ensure_zero_padding: rows of no group become zero in a block that has rows of one; False
            leaves them alone. Blocks without a row of a group keep their values in any case.
        expected_m_for_psum_layout: a hint, no effect.
        m_indices: the older name of `grouped_layout`.

    Values of `grouped_layout` are checked on CPU, on CUDA only with DG_DEBUG_CHECKS=1.

    Raises ValueError or TypeError for what does not fit; the text says what, why and what to do.
    """
    check_compiled_dims(compiled_dims)
    layout = _one_layout(grouped_layout, m_indices)
    _contiguous("nt", a, b, d, layout, use_psum_layout, ensure_zero_padding)


def m_grouped_bf16_gemm_nn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor | None = None,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    *,
    m_indices: torch.Tensor | None = None,
) -> None:
    """`m_grouped_bf16_gemm_nt_contiguous` with B as [groups, k, n]; torch's matmul."""
    check_compiled_dims(compiled_dims)
    layout = _one_layout(grouped_layout, m_indices)
    _contiguous("nn", a, b, d, layout, use_psum_layout, ensure_zero_padding)


def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    compiled_dims: str = "nk",
) -> None:
    """D[g] = A[g] @ B[g].T in the first masked_m[g] rows of each group g. Runs torch's bmm.

    On CUDA all rows are computed, and those past `masked_m` keep their values in D.

    Args:
        a, b: bfloat16 [groups, m_max, k] and [groups, n, k], any strides.
        d: bfloat16 or float32 [groups, m_max, n], rows contiguous.
        masked_m: int32 [groups], 0 to m_max; checked on CPU, on CUDA with DG_DEBUG_CHECKS=1.
        expected_m: a hint, no effect.
        compiled_dims: accepted for compatibility, letters out of "mnk", no effect.

    Raises ValueError or TypeError for what does not fit; the text says what, why and what to do.
    """
    check_compiled_dims(compiled_dims)
    bf16_checks.check_operands(a, b, (3, 3), _BF16)
    groups, m, k = a.shape
    n = b.shape[1]
    bf16_checks.check_shape("b", b, (groups, n, k), f"(groups, n, k) for a of {tuple(a.shape)}")
    bf16_checks.check_output(d, (groups, m, n), "(groups, m_max, n)", a, b)
    bf16_checks.check_groups("masked", masked_m, m, groups, d)
    if d.numel():
        with _plain_torch(d):
            bf16_matmul.multiply_masked(d, a, b.transpose(1, 2), masked_m)


bf16_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked


def k_grouped_bf16_gemm_tn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    ks_cpu: Sequence[int],
    grouped_layout: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    """D[g] = (C[g] +) A[rows of g].T @ B[rows of g] for each group g. Runs torch's matmul for each.

    Args:
        a, b: bfloat16 [sum of K_g, m] and [sum of K_g, n], any strides.
        d: bfloat16 or float32 [groups, m, n], rows contiguous.
        ks_cpu: the sizes K_g, a list of ints, 0 and all others allowed. K_g = 0: D[g] becomes C[g],
            or zeros.
        grouped_layout: the same sizes as int32 [groups] where `d` is; only checked.
        c: what the products are added to, like `d`: a tensor of its own, or `d`. None: overwrite.
        compiled_dims: accepted for compatibility, letters out of "mnk", no effect.
        use_psum_layout: must be False.

    Raises ValueError or TypeError for what does not fit, NotImplementedError for prefix sums.
    """
    check_compiled_dims(compiled_dims)
    if use_psum_layout:
        raise NotImplementedError(
            "use_psum_layout is True, expected False: prefix sums along k are for SM100 GPUs; pass "
            "the sizes K_g"
        )
    bf16_checks.check_operands(a, b, (2, 2), _BF16)
    k, m = a.shape
    n = b.shape[1]
    bf16_checks.check_shape("b", b, (k, n), f"(sum of K_g, n) for a of {tuple(a.shape)}")
    sizes = bf16_checks.check_sizes(ks_cpu, grouped_layout, k, a.device)
    bf16_checks.check_output(d, (len(sizes), m, n), "(groups, m, n)", a, b)
    bf16_checks.check_accumulator(c, d)
    if not d.numel():
        return
    with _plain_torch(d):
        start = 0
        for group, size in enumerate(sizes):
            rows = slice(start, start + size)
            c_group = None if c is None else c[group]
            bf16_matmul.multiply(d[group], a[rows].t(), b[rows], c_group)
            start += size


def _one_layout(grouped_layout: Any, m_indices: Any) -> Any:
    if (grouped_layout is None) == (m_indices is None):
        raise TypeError(
            "grouped_layout and its older name m_indices are both "
            + ("missing" if m_indices is None else "given")
            + ", expected one of them; pass grouped_layout"
        )
    return m_indices if grouped_layout is None else grouped_layout


def _dense(layout: str, a: Any, b: Any, d: Any, c: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    """Each letter of `layout` says whether an operand is given as [m, k], [k, n] ("n") or not."""
    bf16_checks.check_operands(a, b, (2, 2), dtypes)
    m, k = a.shape if layout[0] == "n" else a.shape[::-1]
    n = b.shape[0] if layout[1] == "t" else b.shape[1]
    expected, meaning = ((n, k), "(n, k)") if layout[1] == "t" else ((k, n), "(k, n)")
    bf16_checks.check_shape("b", b, expected, f"{meaning} for a of shape {tuple(a.shape)}")
    bf16_checks.check_output(d, (m, n), "(m, n)", a, b)
    bf16_checks.check_accumulator(c, d)
    if not d.numel():
        return
    a, b = (a if layout[0] == "n" else a.t()), (b if layout[1] == "n" else b.t())
    with _plain_torch(d):
        if a.dtype == _FP8:
            bf16_matmul.multiply_fp8(d, a, b, c)
        else:
            bf16_matmul.multiply(d, a, b, c)


def _contiguous(layout: str, a: Any, b: Any, d: Any, groups: Any, psum: bool, zero: bool) -> None:
    bf16_checks.check_operands(a, b, (2, 3), _BF16)
    m, k = a.shape
    if layout == "nt":
        num_groups, n, _ = b.shape
        expected, meaning = (num_groups, n, k), "(groups, n, k)"
    else:
        num_groups, _, n = b.shape
        expected, meaning = (num_groups, k, n), "(groups, k, n)"
    bf16_checks.check_shape("b", b, expected, f"{meaning} for a of shape {tuple(a.shape)}")
    bf16_checks.check_output(d, (m, n), "(m, n)", a, b)
    bf16_checks.check_groups("psum" if psum else "contiguous", groups, m, num_groups, d)
    if d.numel():
        b = b.transpose(1, 2) if layout == "nt" else b
        with _plain_torch(d):
            bf16_matmul.multiply_contiguous(d, a, b, groups, settings.mk_alignment, psum, zero)


@contextmanager
def _plain_torch(d: torch.Tensor) -> Iterator[None]:
    """No autograd, since operands may be parameters; no autocast, which would round operands."""
    with torch.no_grad(), torch.autocast(d.device.type, enabled=False):
        yield
