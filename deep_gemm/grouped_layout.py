"""The routing step of a Mixture of Experts: which row of a grouped buffer each token's choice gets.

    layout = build_grouped_layout(topk_ids, num_experts)       # one launch, nothing is waited for
    a = per_token_cast_to_fp8(layout.gather(x))
    m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout.grouped_layout, use_psum_layout=True)
    y = layout.scatter(d, topk_weights)

A *slot* is one choice of one token, `token * topk + j`. Rows of an expert are in the order of their
slots, so the same choices always give the same layout.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from deep_gemm import driver, jit, launch
from deep_gemm.checks import check_gpu
from deep_gemm.config import settings
from deep_gemm.types import LaunchConfig

__all__ = ["GroupedLayout", "build_grouped_layout"]

Layout = Literal["psum", "contiguous", "masked"]

MAX_EXPERTS = 4096  # whose counts fit into shared memory
_NUM_THREADS = 512
_ROWS_OF_THREAD = 4  # that are worth another CTA
_MAX_SIZE = 2**31 - 1  # rows and slots are int32


@dataclass(frozen=True, slots=True, eq=False)
class GroupedLayout:
    """Rows of a grouped buffer and the slots that they hold, all of it on the device.

    Attributes:
        grouped_layout: int32, what the grouped GEMMs take. psum: [experts], the end row of each;
            contiguous: [num_rows], the expert of each row, -1 in padding; masked: [experts], how
            many rows each one uses (`masked_m`).
        row_of_slot: int32 [tokens, topk], the row of each choice, -1 for none.
        slot_of_row: int32 [num_rows], token * topk + j for each row, -1 in padding.
        num_rows: rows of the buffer; masked: experts * m_max, expert e has those from e * m_max on.
        layout: "psum", "contiguous" or "masked".
        alignment: groups begin at multiples of it. A grouped GEMM has to run with the same
            `set_mk_alignment_for_contiguous_layout`. 1 for masked, which has none.
    """

    grouped_layout: torch.Tensor
    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor
    num_rows: int
    layout: Layout
    alignment: int

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """What a buffer's shape begins with: (num_rows,), masked: (experts, m_max)."""
        if self.layout != "masked":
            return (self.num_rows,)
        num_experts = self.grouped_layout.numel()
        return num_experts, self.num_rows // num_experts

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of `x` [tokens, width] in the order of the buffer: [*rows_shape, width].

        Any dtype, FP8 included; padding rows become zeros. PyTorch operations, no synchronisation.
        Where columns of `x` are contiguous, as those of scales are, columns of the result are.
        """
        tokens, topk = self.row_of_slot.shape
        if x.dim() != 2 or x.shape[0] != tokens:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, expected ({tokens}, width), a row for each of the "
                f"{tokens} tokens of topk_ids; flatten other dimensions with "
                f"x.reshape(-1, x.shape[-1])"
            )
        width = x.shape[1]
        if self.row_of_slot.numel() == 0:
            return x.new_zeros((*self.rows_shape, width))
        is_fp8 = x.element_size() == 1 and x.is_floating_point()  # PyTorch cannot index all of them
        data = x.view(torch.uint8) if is_fp8 else x
        token = self.slot_of_row.clamp(min=0).div(topk, rounding_mode="floor")
        is_padding = (self.slot_of_row < 0).unsqueeze(1)
        if x.stride(0) == 1 and x.stride(1) != 1:
            rows = data.t().index_select(1, token).t()
        else:
            rows = data.index_select(0, token)
        rows.masked_fill_(is_padding, 0)
        rows = rows.view(x.dtype) if is_fp8 else rows
        return rows.view(*self.rows_shape, width)

    def scatter(self, d: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Sum rows of `d` [*rows_shape, width] over the choices of each token: [tokens, width].

        `weights` [tokens, topk] multiplies them, usually with the router's probabilities. A choice
        without a row adds nothing, and padding is not looked at. Sums are float32 (float64 for
        float64), in the order of choices; the result has the dtype of `d`. PyTorch operations, no
        synchronisation.
        """
        tokens, topk = self.row_of_slot.shape
        if d.dim() != len(self.rows_shape) + 1 or d.shape[:-1] != self.rows_shape:
            expected = ", ".join(map(str, (*self.rows_shape, "width")))
            raise ValueError(
                f"d has shape {tuple(d.shape)}, expected ({expected}), a row for each of the "
                f"buffer; gather makes that shape"
            )
        if weights is not None and weights.shape != (tokens, topk):
            if topk != 1 or weights.shape != (tokens,):
                raise ValueError(
                    f"weights has shape {tuple(weights.shape)}, expected {(tokens, topk)} = "
                    f"(tokens, topk), that of topk_ids; weights.reshape makes it"
                )
            weights = weights.unsqueeze(1)
        dtype = torch.promote_types(d.dtype, torch.float32)
        total = d.new_zeros((tokens, d.shape[-1]), dtype=dtype)
        if self.num_rows == 0:
            return total.to(d.dtype)
        rows = d.flatten(0, -2)
        for j in range(topk):
            row = self.row_of_slot[:, j]
            part = rows.index_select(0, row.clamp(min=0)).to(dtype)
            if weights is not None:
                part = part * weights[:, j : j + 1].to(dtype)
            total += part.masked_fill((row < 0).unsqueeze(1), 0)
        return total.to(d.dtype)


def build_grouped_layout(
    topk_ids: torch.Tensor,
    num_experts: int,
    layout: Layout = "psum",
    *,
    alignment: int | None = None,
    num_rows: int | None = None,
    m_max: int | None = None,
) -> GroupedLayout:
    """Give every choice of every token a row of a buffer that a grouped GEMM takes.

    Args:
        topk_ids: int32 or int64 [tokens, topk], or [tokens] for one choice each: experts. What is
            outside of [0, num_experts), such as -1 for a dropped choice, gets no row.
        num_experts: 1 to 4096.
        layout: "psum", "contiguous" or "masked"; see `GroupedLayout`.
        alignment: for psum and contiguous, groups begin at multiples of it; None:
            `get_mk_alignment_for_contiguous_layout`. Grouped GEMMs want a multiple of 16 for
            contiguous.
        num_rows: for psum and contiguous, rows of the buffer. None: as many as any choices can
            need, which the host knows: tokens * topk, and alignment - 1 for each of min(experts,
            tokens * topk) groups, down to a multiple of the alignment.
        m_max: for masked, rows of each expert. None: the number of tokens, which is enough where
            no token chooses an expert twice.

    Choices that find no room, beyond `num_rows` or `m_max`, get no row, and ends and counts stop
    there. On Hopper this is one launch (one more if `topk_ids` is not contiguous); elsewhere, and
    with ``set_backend("reference")``, PyTorch operations. Nothing is synchronised or read by the
    host, so that it can be captured in a CUDA graph.

    Raises:
        TypeError, ValueError: an argument does not fit; the text says which, why and what to do.
        NotImplementedError: a GPU other than Hopper.
    """
    _check_ids(topk_ids)
    _check_int("num_experts", num_experts, 1, MAX_EXPERTS, "split the experts over several calls")
    if layout not in get_args(Layout):
        raise ValueError(f"layout is {layout!r}, expected one of {', '.join(get_args(Layout))}")
    ids = topk_ids.detach()
    ids = (ids.unsqueeze(1) if ids.dim() == 1 else ids).contiguous()
    if ids.numel() > _MAX_SIZE:
        raise ValueError(f"topk_ids has {ids.numel()} choices, expected below 2**31; split them")
    if layout == "masked":
        _check_absent(layout, alignment=alignment, num_rows=num_rows)
        alignment = 1
        m_max = len(ids) if m_max is None else m_max
        _check_int("m_max", m_max, 0, _MAX_SIZE // num_experts, "experts * m_max is below 2**31")
        num_rows = num_experts * m_max
    else:
        _check_absent(layout, m_max=m_max)
        alignment = settings.mk_alignment if alignment is None else alignment
        _check_int("alignment", alignment, 1, _MAX_SIZE, "128 is the default")
        num_rows = _check_num_rows(num_rows, ids.numel(), num_experts, alignment)
        m_max = 0
    check_gpu(ids.device)
    build = _launch if _has_kernel(ids) else _reference
    return build(ids, num_experts, layout, alignment, num_rows, m_max)


def _reference(
    ids: torch.Tensor, num_experts: int, layout: Layout, alignment: int, num_rows: int, m_max: int
) -> GroupedLayout:
    """What the kernel does, in PyTorch operations."""
    device = ids.device
    flat = ids.flatten().long()
    experts = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)  # the last: none
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))  # bincount would synchronise
    if layout == "masked":
        begins = torch.arange(num_experts + 1, device=device) * m_max
        limits = begins + m_max
    else:
        aligned = (counts + (alignment - 1)).div(alignment, rounding_mode="floor") * alignment
        begins = aligned.cumsum(0) - aligned
        limits = torch.full_like(begins, num_rows)
    limits[num_experts:].zero_()  # an assignment would synchronise
    ends = torch.minimum(begins + counts, limits)

    sorted_experts, slots = experts.sort(stable=True)
    first = (counts.cumsum(0) - counts)[sorted_experts]  # of the same expert, in that order
    rows = begins[sorted_experts] + torch.arange(len(slots), device=device) - first
    has_row = rows < limits[sorted_experts]
    row_of_slot = torch.empty_like(slots).scatter_(0, slots, rows.where(has_row, -1))
    slot_of_row = torch.full((num_rows + 1,), -1, device=device)  # the last: written, not kept
    slot_of_row.scatter_(0, rows.where(has_row, num_rows), slots)
    if layout == "psum":
        grouped_layout = ends[:-1]
    elif layout == "masked":
        grouped_layout = (ends - begins)[:-1]
    else:
        grouped_layout = torch.full((num_rows + 1,), -1, device=device)
        grouped_layout.scatter_(0, rows.where(has_row, num_rows), sorted_experts)
        grouped_layout = grouped_layout[:-1]
    return GroupedLayout(
        grouped_layout.int(),
        row_of_slot.int().view(ids.shape),
        slot_of_row[:-1].int(),
        num_rows,
        layout,
        alignment,
    )


class _Args(ctypes.Structure):
    """`struct group_rows_args` of the kernel."""

    _fields_ = (
        ("experts", ctypes.c_uint64),
        ("row_of_slot", ctypes.c_uint64),
        ("slot_of_row", ctypes.c_uint64),
        ("group_of_row", ctypes.c_uint64),
        ("group_ends", ctypes.c_uint64),
        ("group_counts", ctypes.c_uint64),
        ("num_slots", ctypes.c_uint32),
        ("slots_per_cta", ctypes.c_uint32),
        ("num_experts", ctypes.c_uint32),
        ("num_rows", ctypes.c_uint32),
        ("alignment", ctypes.c_uint32),
        ("m_max", ctypes.c_uint32),
    )


_OUTPUT = {"contiguous": "group_of_row", "psum": "group_ends", "masked": "group_counts"}


def _launch(
    ids: torch.Tensor, num_experts: int, layout: Layout, alignment: int, num_rows: int, m_max: int
) -> GroupedLayout:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    grouped_layout = empty(num_rows if layout == "contiguous" else num_experts)
    row_of_slot, slot_of_row = empty(*ids.shape), empty(num_rows)
    constants = {
        "NUM_THREADS": _NUM_THREADS,
        "MAX_EXPERTS": MAX_EXPERTS,
        "ID_BYTES": ids.element_size(),
    }
    grid, slots_per_cta = _split(ids.numel(), num_rows, ids.device.index)
    args = _Args(
        experts=ids.data_ptr(),
        row_of_slot=row_of_slot.data_ptr(),
        slot_of_row=slot_of_row.data_ptr(),
        num_slots=ids.numel(),
        slots_per_cta=slots_per_cta,
        num_experts=num_experts,
        num_rows=num_rows,
        alignment=alignment,
        m_max=m_max,
    )
    setattr(args, _OUTPUT[layout], grouped_layout.data_ptr())
    kernel = jit.load_kernel("group_rows", constants)
    launch.run(kernel, LaunchConfig(grid, _NUM_THREADS, 0), args, ids.device.index)
    return GroupedLayout(grouped_layout, row_of_slot, slot_of_row, num_rows, layout, alignment)


def _split(num_slots: int, num_rows: int, device_index: int) -> tuple[int, int]:
    """CTAs, and slots that each gives rows to, by one warp, 32 at a time."""
    available, _ = driver.device_properties(device_index)
    pieces = -(-num_slots // 32)
    wanted = max(pieces, -(-num_rows // (_NUM_THREADS * _ROWS_OF_THREAD)), 1)
    grid = min(wanted, settings.num_sms or available, available)
    return grid, -(-pieces // grid) * 32


def _has_kernel(ids: torch.Tensor) -> bool:
    return ids.device.type == "cuda" and settings.backend != "reference"


def _check_ids(topk_ids: Any) -> None:
    if not isinstance(topk_ids, torch.Tensor):
        raise TypeError(f"topk_ids is a {type(topk_ids).__name__}, expected a torch.Tensor")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"topk_ids has dtype {topk_ids.dtype}, expected torch.int32 or torch.int64; "
            f"topk_ids.int() makes it"
        )
    if topk_ids.dim() not in (1, 2):
        raise ValueError(
            f"topk_ids has shape {tuple(topk_ids.shape)}, expected (tokens, topk) or (tokens,); "
            f"flatten other dimensions with topk_ids.reshape(-1, topk)"
        )


def _check_int(name: str, value: Any, least: int, most: int, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected an int")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}, expected {least} to {most}; {remedy}")


def _check_absent(layout: Layout, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            remedy = "m_max says how many rows it has" if layout == "masked" else "see num_rows"
            raise ValueError(f"{name} is {value!r}, expected None with layout {layout!r}; {remedy}")


def _check_num_rows(num_rows: int | None, num_slots: int, num_experts: int, alignment: int) -> int:
    most = num_slots + min(num_experts, num_slots) * (alignment - 1)
    most -= most % alignment
    if most > _MAX_SIZE:
        raise ValueError(
            f"alignment is {alignment}, with which {num_slots} choices of {num_experts} experts "
            f"can take {most} rows, expected below 2**31; choose a smaller alignment"
        )
    if num_rows is None:
        return most
    _check_int("num_rows", num_rows, 0, _MAX_SIZE, "None makes room for any choices")
    return num_rows
