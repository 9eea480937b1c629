"""Numbers about tensors: similarity, size in bytes, equality of bits."""

from __future__ import annotations

from typing import Any

import torch


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2 * sum(x * y) / sum(x**2 + y**2) in float64: 0 when equal or both zero, NaN with NaN.

    Computed as sum((x - y)**2) / sum(x**2 + y**2), the same number without its cancellation. Raises
    ValueError for tensors of different shapes: broadcast, they would compare something else.
    """
    if x.shape != y.shape:
        raise ValueError(f"y has shape {tuple(y.shape)}, expected {tuple(x.shape)}, that of x")
    x, y = x.double(), y.double()
    total = (x * x + y * y).sum()
    return float((x - y).square().sum() / total) if total != 0 else 0.0


def count_bytes(*tensors: Any) -> int:
    """Bytes of all elements of tensors, of (nested) tuples and lists of them; None counts 0."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, (tuple, list)):
            total += count_bytes(*tensor)
        elif tensor is not None:
            total += tensor.numel() * tensor.element_size()
    return total


def assert_bitwise_equal(x: torch.Tensor, y: torch.Tensor, label: str = "tensors") -> None:
    """Raise AssertionError, saying where, unless `x` and `y` agree in dtype, shape and every bit.

    Unlike `torch.equal`, NaNs of the same bits are equal and -0.0 differs from 0.0.
    """
    if x.dtype != y.dtype or x.shape != y.shape:
        raise AssertionError(
            f"{label}: {x.dtype} {tuple(x.shape)} against {y.dtype} {tuple(y.shape)}"
        )
    width = x.element_size()
    x_bytes, y_bytes = (
        t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).view(-1, width)
        for t in (x, y)
    )
    different = (x_bytes != y_bytes).any(dim=1)
    if different.any():
        first = int(different.int().argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), x.shape))
        raise AssertionError(
            f"{label}: {int(different.sum())} of {x.numel()} elements differ, the first at "
            f"{index}: {x[index].item()!r} against {y[index].item()!r}"
        )
