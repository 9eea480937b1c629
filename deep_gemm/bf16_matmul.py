"""The products of `bf16_gemm`, dense and grouped, in torch's operations, for checked operands.

Where a tensor is not on the CPU, nothing synchronises and no value is read on the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from deep_gemm import driver

_HAS_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()  # of mm and bmm on CUDA: torch >= 2.8
_MAX_GATHERED = 1 << 26  # elements of weights that `_multiply_blocks` copies at a time


def multiply(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None
) -> None:
    """d = (c +) a @ b for bfloat16 a [m, k] and b [k, n]."""
    if c is not None and c.data_ptr() == d.data_ptr():
        c = d  # not another view of it, which would be copied
    if not a.shape[1]:
        d.zero_() if c is None else d.copy_(c)
    elif d.is_cuda and d.dtype == torch.bfloat16:
        torch.mm(a, b, out=d) if c is None else torch.addmm(c, a, b, out=d)
    elif d.is_cuda and _HAS_OUT_DTYPE and c is None:
        torch.mm(a, b, out_dtype=torch.float32, out=d)
    else:
        product = _product(a, b, torch.float32)
        d.copy_(product if c is None else product.add_(c))


def multiply_fp8(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None
) -> None:
    """d = (c +) a @ b for E4M3 a [m, k] and b [k, n] without scales."""
    if c is None and _fits_scaled_mm(d, a, b):
        one = torch.ones((), device=d.device)  # kept for other streams it might not be set yet
        torch._scaled_mm(a, b, one, one, out_dtype=d.dtype, out=d)
    else:
        multiply(d, a.to(torch.bfloat16), b.to(torch.bfloat16), c)  # exact


def multiply_masked(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, masked_m: torch.Tensor
) -> None:
    """d[g] = a[g] @ b[g] in masked_m[g] rows, for a [groups, m, k] and b [groups, k, n]."""
    if _on_host(d):
        for group, rows in enumerate(masked_m.tolist()):
            multiply(d[group, :rows], a[group, :rows], b[group])
    else:
        inside = torch.arange(d.shape[1], device=d.device) < masked_m[:, None]
        d.copy_(torch.where(inside[..., None], _product(a, b, d.dtype), d))


def multiply_contiguous(
    d: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    layout: torch.Tensor,
    alignment: int,
    is_psum: bool,
    zero_padding: bool,
) -> None:
    """d[rows of g] = a[rows of g] @ b[g] for a [m, k] and b [groups, k, n], m and n not 0."""
    block = min(alignment, len(a))
    groups = _groups_of_ends if is_psum else _groups_of_ids
    group_of_row = groups(layout, len(a), len(b), alignment)
    group_of_row, padding, group_of_block = _by_block(group_of_row, block)
    if _on_host(d):
        values, counts = torch.unique_consecutive(group_of_row, return_counts=True)
        start = 0
        for group, count in zip(values.tolist(), counts.tolist(), strict=True):
            rows = slice(start, start + count)
            if group >= 0:
                multiply(d[rows], a[rows], b[group])
            start += count
    else:
        if _fits_grouped_mm(d, b):
            product = _multiply_sorted(a, b, group_of_row)
        else:
            product = _multiply_blocks(a, b, group_of_block, block, d.dtype)
        d.copy_(torch.where(group_of_row[:, None] >= 0, product, d))
    if zero_padding:
        d.masked_fill_(padding[:, None], 0)


def _on_host(d: torch.Tensor) -> bool:
    return d.device.type == "cpu"


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b for a [.., m, k] and b [.., k, n], both of 2 or both of 3 dimensions."""
    if a.is_cuda and dtype == torch.bfloat16:
        return a @ b
    if a.is_cuda and _HAS_OUT_DTYPE and a.numel():
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=dtype)
    return (a.float() @ b.float()).to(dtype)  # TF32, where it is allowed, has all bits of bfloat16


def _groups_of_ids(ids: torch.Tensor, m: int, num_groups: int, alignment: int) -> torch.Tensor:
    """[m]: the group of each row, -1 for none."""
    ids = ids.long()
    return torch.where((ids >= 0) & (ids < num_groups), ids, -1)


def _groups_of_ends(ends: torch.Tensor, m: int, num_groups: int, alignment: int) -> torch.Tensor:
    """[m]: the group of each row, -1 for none."""
    ends = ends.long()
    starts = F.pad((ends[:-1] + alignment - 1) // alignment * alignment, (1, 0))
    rows = torch.arange(m, device=ends.device)
    group = torch.searchsorted(ends, rows, right=True)  # the first one that ends after the row
    existing = group.clamp(max=num_groups - 1)
    return torch.where((group < num_groups) & (rows >= starts[existing]), existing, -1)


def _by_block(
    group_of_row: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[m] group, [m] whether padding of a block with a group, [blocks] group; -1 for none.

    The first row that has a group says which one it is for all of its block.
    """
    m = len(group_of_row)
    blocks = F.pad(group_of_row, (0, -m % block), value=-1).view(-1, block)
    first = (blocks >= 0).int().argmax(1, keepdim=True)
    group_of_block = blocks.gather(1, first)
    owner = group_of_block.expand_as(blocks).reshape(-1)[:m]
    is_padding = (group_of_row < 0) & (owner >= 0)
    return torch.where(group_of_row >= 0, owner, -1), is_padding, group_of_block[:, 0]


def _multiply_sorted(a: torch.Tensor, b: torch.Tensor, group_of_row: torch.Tensor) -> torch.Tensor:
    """a [m, k] @ b [groups, k, n] by `torch._grouped_mm`; rows of group -1 are left undefined."""
    groups = torch.arange(len(b), device=a.device)
    key, order = torch.where(group_of_row >= 0, group_of_row, len(b)).sort(stable=True)
    ends = torch.searchsorted(key, groups, right=True, out_int32=True)
    product = torch._grouped_mm(a.index_select(0, order), b, offs=ends)
    return torch.empty_like(product).index_copy_(0, order, product)


def _multiply_blocks(
    a: torch.Tensor, b: torch.Tensor, group_of_block: torch.Tensor, block: int, dtype: torch.dtype
) -> torch.Tensor:
    """a [m, k] @ b [groups, k, n], block by block; rows of group -1 are left undefined."""
    m, n = len(a), b.shape[2]
    product = torch.empty((m, n), dtype=dtype, device=a.device)
    whole = m // block
    step = max(1, _MAX_GATHERED // max(1, b[0].numel()))
    bands = [(first, min(first + step, whole), block) for first in range(0, whole, step)]
    if m % block:
        bands.append((whole, whole + 1, m % block))  # the last block is shorter
    for first, last, height in bands:
        rows = slice(first * block, first * block + (last - first) * height)
        weights = b.index_select(0, group_of_block[first:last].clamp(min=0))
        product[rows] = _product(a[rows].unflatten(0, (-1, height)), weights, dtype).flatten(0, 1)
    return product


def _fits_grouped_mm(d: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `torch._grouped_mm` takes b [groups, k, n] without a synchronisation."""
    groups, k, n = b.shape
    group_stride, k_stride, n_stride = b.stride()
    return (
        _is_hopper(d)
        and hasattr(torch, "_grouped_mm")
        and _HAS_OUT_DTYPE  # torch >= 2.8
        and d.dtype == torch.bfloat16
        and groups < 1024
        and not (k % 8 or n % 8 or b.data_ptr() % 16 or group_stride % 8)
        and k > 0
        and (
            (k_stride == 1 and n_stride >= k and n_stride % 8 == 0)
            or (n_stride == 1 and k_stride >= n and k_stride % 8 == 0)
        )
    )


def _fits_scaled_mm(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether cuBLASLt takes FP8 a [m, k], b [k, n] (it may rely on 256-byte alignment)."""
    k, n = b.shape
    return (
        _is_hopper(d)
        and not (k % 16 or n % 16 or k == 0)
        and a.stride(1) == b.stride(0) == 1
        and all(size >= k and size % 16 == 0 for size in (a.stride(0), b.stride(1)))
        and d.stride(0) >= n
        and d.stride(0) % 8 == 0
        and all(tensor.data_ptr() % 256 == 0 for tensor in (a, b, d))
    )


def _is_hopper(d: torch.Tensor) -> bool:
    return d.is_cuda and driver.device_properties(d.device.index)[1] == (9, 0)
