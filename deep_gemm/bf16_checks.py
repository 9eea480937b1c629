"""The errors of `bf16_gemm`: every argument is checked here, before any work.

As in `checks` and `grouped_checks`, metadata alone is read on a GPU.
"""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch

from deep_gemm.checks import _check_tensor
from deep_gemm.config import settings
from deep_gemm.grouped_checks import _check_layout, _check_values, must_check_values
from deep_gemm.types import Problem

_OUTPUT = (torch.bfloat16, torch.float32)


def check_operands(a: Any, b: Any, dims: tuple[int, int], dtypes: tuple[torch.dtype, ...]) -> None:
    """`a` and `b` are tensors of one of `dtypes`, of `dims` dimensions, on one device."""
    for name, tensor, dim in (("a", a, dims[0]), ("b", b, dims[1])):
        _check_tensor(name, tensor)
        if tensor.dtype not in dtypes:
            expected = " or ".join(map(str, dtypes))
            raise TypeError(
                f"{name} has dtype {tensor.dtype}, expected {expected}; {name}.to({dtypes[0]}) "
                f"has it"
            )
        if tensor.dim() != dim:
            raise ValueError(
                f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}, expected "
                f"{dim}; reshape it"
            )
    if a.dtype != b.dtype:
        raise TypeError(f"b has dtype {b.dtype}, expected {a.dtype} as a; b.to({a.dtype}) has it")
    _check_device("b", b, a.device)


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...], meaning: str) -> None:
    """`tensor` has the shape `expected`, which is what `meaning` says."""
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, expected {expected} = {meaning}; transpose "
            f"or allocate it so"
        )


def check_output(
    d: Any, expected: tuple[int, ...], meaning: str, a: torch.Tensor, b: torch.Tensor
) -> None:
    """`d` can be written: its dtype, shape, device, strides, and no memory shared with `a`, `b`."""
    _check_tensor("d", d)
    if d.dtype not in _OUTPUT:
        raise TypeError(
            f"d has dtype {d.dtype}, expected torch.bfloat16 or torch.float32; allocate it so"
        )
    check_shape("d", d, expected, meaning)
    _check_device("d", d, a.device)
    extent = 1
    for dim in reversed(range(d.dim()) if d.numel() else ()):
        size, stride = d.shape[dim], d.stride(dim)
        if size > 1 and (stride < extent or (dim == d.dim() - 1 and stride != 1)):
            raise ValueError(
                f"d has strides {d.stride()} for shape {tuple(d.shape)}, expected stride 1 in the "
                f"last dimension, and no rows or groups that overlap; allocate it with torch.empty"
            )
        extent += (size - 1) * stride if size > 1 else 0
    for name, tensor in (("a", a), ("b", b)):
        if _overlap(d, tensor):
            raise ValueError(
                f"d shares memory with {name}, expected separate storage; pass a new tensor as d"
            )


def check_accumulator(c: Any, d: torch.Tensor) -> None:
    """`c` is None or like `d`: in the same place, or in another one."""
    if c is None:
        return
    _check_tensor("c", c)
    if c.dtype != d.dtype:
        raise TypeError(f"c has dtype {c.dtype}, expected {d.dtype} as d; c.to({d.dtype}) has it")
    check_shape("c", c, tuple(d.shape), "the shape of d")
    _check_device("c", c, d.device)
    strides = [
        [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
        for x in (c, d)
    ]
    if _overlap(c, d) and (c.data_ptr() != d.data_ptr() or strides[0] != strides[1]):
        raise ValueError(
            f"c shares memory with d at another place or with other strides ({c.stride()}, d has "
            f"{d.stride()}), expected d itself or separate storage; pass d or c.clone()"
        )


def check_groups(
    kind: Literal["contiguous", "psum", "masked"],
    layout: Any,
    m: int,
    num_groups: int,
    d: torch.Tensor,
) -> None:
    """The group ids, ends or sizes of a grouped call: what the FP8 functions check of them."""
    if num_groups == 0:
        raise ValueError("b has 0 groups, expected at least one; pass weights")
    alignment = settings.mk_alignment
    if kind == "contiguous" and alignment % 16:
        raise ValueError(
            f"the alignment of groups is {alignment}, expected a multiple of 16 for group ids per "
            f"row (set_mk_alignment_for_contiguous_layout); use_psum_layout=True takes any"
        )
    name = "masked_m" if kind == "masked" else "grouped_layout"
    length, meaning = (m, "rows of a") if kind == "contiguous" else (num_groups, "groups")
    _check_layout(name, layout, length, meaning, d.device)
    problem = Problem(kind, m, d.shape[-1], 0, str(d.device), 0, 0, 0, (0, 0), num_groups)
    _check_values(problem, layout, alignment)


def check_sizes(ks_cpu: Any, layout: Any, k: int, device: torch.device) -> list[int]:
    """The sizes `ks_cpu`, whose sum is `k` and which `layout` repeats, as a list of ints."""
    try:
        if isinstance(ks_cpu, torch.Tensor):
            raise TypeError
        sizes = [operator.index(size) for size in ks_cpu]
    except TypeError:
        raise TypeError(
            f"ks_cpu is a {type(ks_cpu).__name__}, expected a list of ints, the size of each "
            f"group; grouped_layout.tolist() makes it, and synchronises"
        ) from None
    if sum(sizes) != k or min(sizes, default=0) < 0:
        raise ValueError(
            f"ks_cpu is {sizes} with sum {sum(sizes)}, expected sizes of 0 or more with sum {k}, "
            f"the rows of a and b; cut off rows that belong to no group"
        )
    _check_layout("grouped_layout", layout, len(sizes), "groups", device)
    if layout.device.type != "meta" and must_check_values(device) and layout.tolist() != sizes:
        raise ValueError(
            f"grouped_layout is {layout.tolist()}, expected the sizes of ks_cpu, {sizes}; "
            f"torch.tensor(ks_cpu, dtype=torch.int32) has them"
        )
    return sizes


def _check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device}, expected {device} where a is; "
            + ("allocate it there" if name == "d" else f"{name}.to({str(device)!r}) moves it")
        )


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether memory is shared, as far as can be told: views with gaps are trusted."""
    begin_x, begin_y = x.data_ptr(), y.data_ptr()
    if not (begin_x and begin_y and x.numel() and y.numel()):  # 0: no memory, as of meta tensors
        return False
    if begin_x == begin_y:
        return True
    dense = all(t.is_contiguous() or t.transpose(-1, -2).is_contiguous() for t in (x, y))
    return dense and begin_x < begin_y + y.nbytes and begin_y < begin_x + x.nbytes
