"""Tensors of a grouped call -> `Problem`: shapes, dtypes, strides, devices; values if asked for.

As in `checks`, metadata alone is read on a GPU. Values of group ids and sizes are checked where
that costs nothing, on a CPU, and everywhere with DG_DEBUG_CHECKS=1, which stops the GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from deep_gemm.checks import (
    _MAX_SIZE,
    Recipe,
    _check_k_major,
    _check_operand_dtypes,
    _check_output,
    _check_recipe,
    _check_row_stride,
    _check_scale_shape,
    _check_sfb_layout,
    _check_tensor,
    _pair,
    check_addresses,
    check_gpu,
)
from deep_gemm.config import settings
from deep_gemm.types import BLOCK_K, Problem


def check_contiguous(
    a: Any,
    b: Any,
    d: Any,
    grouped_layout: Any,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    use_psum_layout: bool = False,
    expected_m: int | None = None,
) -> Problem:
    """Check one call with A [M, K] and D [M, N] of all groups, B [G, N, K]; see `grouped_gemm`.

    Raises TypeError, ValueError and NotImplementedError as `checks.check_dense` does.
    """
    a_data, sfa, b_data, sfb = _check_operands(a, b, d, recipe, recipe_a, recipe_b)
    _check_ranks(
        {"a": (a_data, 2), "sfa": (sfa, 2), "d": (d, 2), "b": (b_data, 3), "sfb": (sfb, 3)}
    )
    m, k = a_data.shape
    num_groups, n, _ = b_data.shape
    _check_weight_shape(b_data, k, f"a of shape {tuple(a_data.shape)}")
    if tuple(d.shape) != (m, n):
        raise ValueError(
            f"d has shape {tuple(d.shape)}, expected {(m, n)} = (m, n) for a of shape "
            f"{tuple(a_data.shape)} and b of shape {tuple(b_data.shape)}; allocate d with it"
        )
    k_blocks = -(-k // BLOCK_K)
    _check_scale_shape("a", sfa, (m, k_blocks), f"(m, ceil(k / 128)) for m = {m}, k = {k}")
    problem = _check_rest(
        "psum" if use_psum_layout else "contiguous", a_data, sfa, b_data, sfb, d, grouped_layout,
        _default_expected_m(expected_m, m, num_groups),
    )  # fmt: skip
    alignment = settings.mk_alignment
    if not use_psum_layout and alignment % 16:
        raise ValueError(
            f"the alignment of groups is {alignment}, expected a multiple of 16 for group ids per "
            f"row (set_mk_alignment_for_contiguous_layout); use_psum_layout=True takes any"
        )
    length, meaning = (num_groups, "groups") if use_psum_layout else (m, "rows of a")
    _check_layout("grouped_layout", grouped_layout, length, meaning, d.device)
    _check_values(problem, grouped_layout, alignment)
    return problem


def check_masked(
    a: Any,
    b: Any,
    d: Any,
    masked_m: Any,
    expected_m: Any,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
) -> Problem:
    """Check one call with A [G, m_max, K], B [G, N, K] and D [G, m_max, N]; see `grouped_gemm`.

    Raises TypeError, ValueError and NotImplementedError as `checks.check_dense` does.
    """
    a_data, sfa, b_data, sfb = _check_operands(a, b, d, recipe, recipe_a, recipe_b)
    _check_ranks(
        {"a": (a_data, 3), "sfa": (sfa, 3), "d": (d, 3), "b": (b_data, 3), "sfb": (sfb, 3)}
    )
    num_groups, m_max, k = a_data.shape
    n = b_data.shape[1]
    if b_data.shape[0] != num_groups:
        raise ValueError(
            f"b has shape {tuple(b_data.shape)}, expected ({num_groups}, {n}, {k}) = "
            f"(groups, n, k) for a of shape {tuple(a_data.shape)}; a and b have one matrix for "
            f"each group"
        )
    _check_weight_shape(b_data, k, f"a of shape {tuple(a_data.shape)}")
    if tuple(d.shape) != (num_groups, m_max, n):
        raise ValueError(
            f"d has shape {tuple(d.shape)}, expected {(num_groups, m_max, n)} = "
            f"(groups, m_max, n) for a of shape {tuple(a_data.shape)} and b of shape "
            f"{tuple(b_data.shape)}; allocate d with it"
        )
    k_blocks = -(-k // BLOCK_K)
    _check_scale_shape(
        "a",
        sfa,
        (num_groups, m_max, k_blocks),
        f"(groups, m_max, ceil(k / 128)) for m_max = {m_max}, k = {k}",
    )
    if not isinstance(expected_m, int) or isinstance(expected_m, bool):
        raise TypeError(
            f"expected_m is {expected_m!r}, expected an int: about how many rows a group uses, a "
            f"hint; ceil(tokens * topk / experts) is a good one"
        )
    problem = _check_rest(
        "masked", a_data, sfa, b_data, sfb, d, masked_m, min(max(expected_m, 0), m_max)
    )
    _check_layout("masked_m", masked_m, num_groups, "groups", d.device)
    _check_values(problem, masked_m, 1)
    return problem


def _check_operands(
    a: Any, b: Any, d: Any, recipe: Recipe, recipe_a: Recipe, recipe_b: Recipe
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    a_data, sfa = _pair("a", a)
    b_data, sfb = _pair("b", b)
    _check_tensor("d", d)
    _check_recipe(recipe, recipe_a, recipe_b)
    _check_output(None, d)
    _check_operand_dtypes("a", a_data, sfa)
    _check_operand_dtypes("b", b_data, sfb)
    return a_data, sfa, b_data, sfb


def _check_ranks(tensors: dict[str, tuple[torch.Tensor, int]]) -> None:
    for name, (tensor, rank) in tensors.items():
        if tensor.dim() != rank:
            shapes = {
                "a": "[m, k]", "sfa": "[m, ceil(k / 128)]", "d": "[m, n]", "b": "[n, k]",
                "sfb": "[ceil(n / 128), ceil(k / 128)]",
            }  # fmt: skip
            groups = "[groups, " + shapes[name][1:] if rank == 3 else shapes[name]
            raise ValueError(
                f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}, expected "
                f"{rank}, {groups}; the masked layout has a, b and d by groups, the contiguous "
                f"layouts b only"
            )


def _check_weight_shape(b: torch.Tensor, k: int, of: str) -> None:
    num_groups, n, b_k = b.shape
    if b_k != k:
        raise ValueError(
            f"b has shape {tuple(b.shape)}, expected ({num_groups}, {n}, {k}) = (groups, n, k) for "
            f"{of}; the nn form takes [groups, k, n]"
        )
    if num_groups == 0:
        raise ValueError(f"b has shape {tuple(b.shape)}, expected at least one group; pass weights")


def _check_rest(
    kind: Any, a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor,
    d: torch.Tensor, grouped_layout: Any, expected_m: int,
) -> Problem:  # fmt: skip
    """What all layouts have in common: sizes, weight scales, strides, addresses, GPU."""
    m, k = a.shape[-2:]
    num_groups, n, _ = b.shape
    for name, size, multiple in (("n", n, 8), ("k", k, 16)):
        if size % multiple:
            padded = -(-size // multiple) * multiple
            raise ValueError(
                f"{name} is {size}, expected a multiple of {multiple} (TMA moves whole 16-byte "
                f"pieces); pad with zeros to {padded}"
            )
    for name, size in (("rows of a", a.numel() // max(k, 1)), ("groups * n", num_groups * n)):
        if size > _MAX_SIZE:
            raise ValueError(f"{name} is {size}, expected below 2**31; split the call")
    k_blocks, n_blocks = -(-k // BLOCK_K), -(-n // BLOCK_K)
    _check_scale_shape(
        "b",
        sfb,
        (num_groups, n_blocks, k_blocks),
        f"(groups, ceil(n / 128), ceil(k / 128)) for n = {n}, k = {k}",
    )
    for name, data in (("a", a), ("b", b)):
        if data.dim() == 3:
            _check_k_major(name, data[0])
            _check_packed(name, data)
    if d.dim() == 3:
        _check_packed("d", d)
    a_stride = _check_k_major("a", _rows(a))
    b_stride = _check_k_major("b", _rows(b))
    d_stride = _check_row_stride(
        "d", _rows(d), 8, "d = torch.empty(..., n, dtype=torch.bfloat16) has it"
    )
    sfb_strides = _check_sfb_layout(sfb)
    check_addresses(a, sfa, b, sfb, d)
    check_gpu(d.device)
    return Problem(
        kind, m, n, k, str(d.device), a_stride, b_stride, d_stride, sfb_strides, num_groups,
        expected_m,
    )  # fmt: skip


def _check_packed(name: str, tensor: torch.Tensor) -> None:
    groups, rows, _ = tensor.shape
    if groups > 1 and tensor.numel() and tensor.stride(0) != rows * _row_stride(tensor):
        raise ValueError(
            f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}, expected "
            f"groups that follow each other without a gap, stride(0) = shape[1] * stride(1); "
            f"{name}.contiguous() has it"
        )


def _row_stride(tensor: torch.Tensor) -> int:
    return tensor.stride(1) if tensor.shape[1] > 1 else tensor.stride(0)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of all groups as one matrix, without a copy."""
    if tensor.dim() == 2:
        return tensor
    groups, rows, width = tensor.shape
    stride = _row_stride(tensor) if groups * rows > 1 else width
    return tensor.as_strided((groups * rows, width), (stride, tensor.stride(2)))


def _default_expected_m(expected_m: Any, m: int, num_groups: int) -> int:
    if expected_m is None:
        return -(-m // num_groups)
    if not isinstance(expected_m, int) or isinstance(expected_m, bool):
        raise TypeError(
            f"expected_m_for_psum_layout is {expected_m!r}, expected an int or None: about how "
            f"many rows a group has, a hint; ceil(tokens * topk / experts) is a good one"
        )
    return min(max(expected_m, 0), m)


def _check_layout(name: str, layout: Any, length: int, meaning: str, device: torch.device) -> None:
    _check_tensor(name, layout)
    if layout.dtype != torch.int32:
        remedy = f"{name}.int() makes it" if not layout.is_floating_point() else "pass integers"
        raise TypeError(f"{name} has dtype {layout.dtype}, expected torch.int32; {remedy}")
    if tuple(layout.shape) != (length,):
        raise ValueError(
            f"{name} has shape {tuple(layout.shape)}, expected ({length},), one number for each of "
            f"the {length} {meaning}; build_grouped_layout makes it"
        )
    if layout.device != device:
        raise ValueError(
            f"{name} is on {layout.device}, expected {device} where d is; "
            f"{name}.to({str(device)!r}) moves it"
        )
    if length > 1 and layout.stride(0) != 1:
        raise ValueError(
            f"{name} has stride {layout.stride(0)}, expected 1; {name}.contiguous() has it"
        )


def must_check_values(device: torch.device) -> bool:
    """Whether values of group ids and sizes are looked at: always where they are at hand."""
    if device.type == "cpu":
        return True
    if not settings.debug_checks:
        return False
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _check_values(problem: Problem, layout: torch.Tensor, alignment: int) -> None:
    if layout.device.type == "meta" or not must_check_values(layout.device):
        return
    values = layout.tolist()
    if problem.kind == "masked":
        for group, rows in enumerate(values):
            if not 0 <= rows <= problem.m:
                raise ValueError(
                    f"masked_m[{group}] is {rows}, expected 0 to m_max = {problem.m}; allocate a "
                    f"and d with more rows for each group"
                )
    elif problem.kind == "psum":
        start = 0
        for group, end in enumerate(values):
            if not 0 <= end <= problem.m:
                raise ValueError(
                    f"grouped_layout[{group}] is {end}, expected the end of the group, 0 to "
                    f"m = {problem.m}"
                )
            if group > 0 and end < values[group - 1]:
                raise ValueError(
                    f"grouped_layout[{group}] is {end}, expected {values[group - 1]} or more: ends "
                    f"of groups ascend, and group {group} starts at {start}"
                )
            start = -(-end // alignment) * alignment
    else:
        _check_ids(values, problem.num_groups, alignment)


def _check_ids(ids: list[int], num_groups: int, alignment: int) -> None:
    for begin in range(0, len(ids), alignment):
        block = ids[begin : begin + alignment]
        if min(block) == max(block) and -1 <= block[0] < num_groups:
            continue
        first = next((group for group in block if group != -1), -1)
        for row, group in enumerate(block, begin):
            if not -1 <= group < num_groups:
                raise ValueError(
                    f"grouped_layout[{row}] is {group}, expected -1 (skip) to {num_groups - 1} for "
                    f"b of {num_groups} groups"
                )
            if group not in (-1, first):
                raise ValueError(
                    f"grouped_layout[{row}] is {group}, expected {first} or -1: the {alignment} "
                    f"rows from {begin} on belong to one group "
                    f"(get_mk_alignment_for_contiguous_layout); sort the rows by group and pad "
                    f"groups to the alignment, or use build_grouped_layout"
                )
