"""The argument of a GEMM kernel: packed once, then copied for other addresses."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any

import torch

from deep_gemm import layout
from deep_gemm.launch import Launch
from deep_gemm.tensor_map import TENSOR_MAP_BYTES, make_tensor_map, replace_address
from deep_gemm.types import BLOCK_K, GemmPlan, Problem

MAX_ENTRIES = 4096
_ROW_KINDS = {"contiguous": 0, "psum": 1, "masked": 2}  # grouped_scheduler.cuh
_NUM_TENSOR_MAPS = 9


class _GroupedRows(ctypes.Structure):
    """`struct GroupedRows` of the kernel."""

    _fields_ = (
        ("grouped_layout", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("num_groups", ctypes.c_uint32),
        ("shape_m", ctypes.c_uint32),
        ("alignment", ctypes.c_uint32),
        ("zero_padding", ctypes.c_uint32),
        ("next_unit", ctypes.c_uint64),
    )


class KernelArgs(ctypes.Structure):
    """`struct fp8_gemm_1d2d_args`; the tail is what its alignment of 128 adds."""

    _fields_ = (
        ("_tensor_maps", ctypes.c_uint8 * (_NUM_TENSOR_MAPS * TENSOR_MAP_BYTES)),
        ("sfb", ctypes.c_uint64),
        ("sfb_stride_group", ctypes.c_uint32),
        ("sfb_stride_n", ctypes.c_uint32),
        ("sfb_stride_k", ctypes.c_uint32),
        ("shape_m", ctypes.c_uint32),
        ("shape_n", ctypes.c_uint32),
        ("shape_k", ctypes.c_uint32),
        ("raster_m", ctypes.c_uint32),
        ("is_b_read_once", ctypes.c_uint32),
        ("d_stride", ctypes.c_uint32),
        ("d", ctypes.c_uint64),
        ("rows", _GroupedRows),
        ("_tail", ctypes.c_uint8 * 32),
    )

    def set_tensor_map(self, index: int, tensor_map: bytes) -> None:
        offset = index * TENSOR_MAP_BYTES
        ctypes.memmove(ctypes.addressof(self) + offset, tensor_map, TENSOR_MAP_BYTES)


@dataclass(frozen=True)
class Operands:
    """The tensors of a checked call."""

    a: torch.Tensor
    sfa: torch.Tensor
    b: torch.Tensor
    sfb: torch.Tensor
    d: torch.Tensor
    grouped_layout: torch.Tensor | None = None

    def addresses(self) -> tuple[int, int, int, int]:
        """What tensor maps point at: A, its scales, B, D."""
        return self.a.data_ptr(), self.sfa.data_ptr(), self.b.data_ptr(), self.d.data_ptr()


class UnitCounters:
    """Where the CTAs of a grouped launch count the units that they have drawn.

    A launch finds its counter 0 and leaves it 0, so launches may share one unless they run at the
    same time. Those that do never write the same D by the same layout: hence one counter for each
    such pair. Launches beyond `COUNT` pairs get none; the kernel then hands out units in turn.
    """

    COUNT = 1 << 16

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[int, int] = {}  # device -> address
        self._kept: list[torch.Tensor] = []
        self._index_of: dict[tuple[int, int, int], int] = {}

    def address(self, device_index: int, d: int, grouped_layout: int) -> int:
        """Device address of the counter of D and layout at these addresses; 0: none."""
        with self._lock:
            first = self._counters.get(device_index) or self._allocate(device_index)
            key = device_index, d, grouped_layout
            index = self._index_of.get(key, len(self._index_of))
            if not first or index >= self.COUNT:
                return 0
            self._index_of[key] = index
            return first + 4 * index

    def _allocate(self, device_index: int) -> int:
        if torch.cuda.is_current_stream_capturing():  # memory of a graph does not last
            return 0
        with torch.cuda.device(device_index):
            counters = torch.zeros(self.COUNT, dtype=torch.int32, device="cuda")
            torch.cuda.current_stream().synchronize()  # once: other streams use them, too
        self._kept.append(counters)
        self._counters[device_index] = counters.data_ptr()
        return counters.data_ptr()


unit_counters = UnitCounters()
_A, _SFA, _B, _D = range(4)  # places in `Operands.addresses`


class Template:
    """A launch for given sizes and strides, to be copied for the addresses of each call."""

    __slots__ = ("_addresses", "_args", "_launch", "_map_operands")

    def __init__(
        self,
        launch: Launch,
        args: KernelArgs,
        addresses: tuple[int, ...],
        map_operands: dict[int, int],
    ) -> None:
        self._launch, self._args, self._addresses = launch, args, addresses
        self._map_operands = tuple(map_operands.items())

    def at(self, operands: Operands) -> Launch:
        args = KernelArgs.from_buffer_copy(self._args)
        args.sfb = operands.sfb.data_ptr()
        args.d = operands.d.data_ptr()
        if operands.grouped_layout is not None:
            layout_address = operands.grouped_layout.data_ptr()
            args.rows.grouped_layout = layout_address
            args.rows.next_unit = unit_counters.address(
                operands.d.device.index, args.d, layout_address
            )
        addresses = operands.addresses()
        first_map = ctypes.addressof(args)
        for index, operand in self._map_operands:
            if addresses[operand] != self._addresses[operand]:
                replace_address(first_map + index * TENSOR_MAP_BYTES, addresses[operand])
        return self._launch.with_args(args)


def make_template(
    kernel: Any,
    problem: Problem,
    gemm_plan: GemmPlan,
    operands: Operands,
    device_index: int,
    alignment: int = 1,
    zero_padding: bool = False,
) -> Template:
    """Pack the argument of a checked and planned call.

    Scales of A that are not native are described as their native copy will be.
    """
    config, m, n, k = gemm_plan.kernel, problem.m, problem.n, problem.k
    k_blocks = -(-k // BLOCK_K)
    args = KernelArgs(
        sfb_stride_group=-(-n // BLOCK_K) * k_blocks,
        sfb_stride_n=problem.sfb_strides[0],
        sfb_stride_k=problem.sfb_strides[1],
        shape_m=m,
        shape_n=n,
        shape_k=k,
        raster_m=gemm_plan.raster_m,
        is_b_read_once=gemm_plan.is_b_read_once,
        d_stride=problem.d_stride,
    )
    if config.is_grouped:
        args.rows.kind = _ROW_KINDS[problem.kind]
        args.rows.num_groups = problem.num_groups
        args.rows.shape_m = m
        args.rows.alignment = min(alignment, m)  # more makes no difference
        args.rows.zero_padding = zero_padding
    sf_groups = problem.num_groups if problem.kind == "masked" else 1
    rows_a, rows_b = sf_groups * m, problem.num_groups * n
    a_rows, b_rows = config.block_m // config.cluster_n, config.block_n // config.cluster_m
    # Boxes for whole tiles, then for parts: the kernel tells why.
    a_parts: tuple[int, ...] = (m % a_rows or a_rows,)
    if config.is_grouped:  # `PartBox` of the kernel
        largest = 1 << (a_rows - 1).bit_length() - 1
        a_parts = largest, largest // 2, largest // 4
    sfa_boxes: tuple[int, ...]
    sfa_boxes = config.block_m, -(-(m % config.block_m) // 4) * 4 or config.block_m
    if config.is_grouped:  # groups may begin between multiples of four rows
        sfa_boxes = (config.block_m + 4,)
    pa, psfa, pb, pd = operands.addresses()
    psfa = psfa // 16 * 16
    sfa_stride = layout.native_sfa_stride(operands.sfa, m, k)
    maps: dict[int, tuple[int, bytes]] = {}
    for i, rows in enumerate((a_rows, *a_parts)):
        box = rows, BLOCK_K
        maps[i] = _A, make_tensor_map(pa, "uint8", (rows_a, k), problem.a_stride, box, 128)
    for i, rows in enumerate((b_rows, n % b_rows or b_rows)):
        box = rows, BLOCK_K
        maps[4 + i] = _B, make_tensor_map(pb, "uint8", (rows_b, k), problem.b_stride, box, 128)
    for i, rows in enumerate(sfa_boxes):
        shape, box = (sf_groups * k_blocks, m), (1, rows)
        maps[6 + i] = _SFA, make_tensor_map(psfa, "float32", shape, sfa_stride, box, 0)
    box = 16, config.slab_n
    swizzle = config.slab_n * 2
    maps[8] = _D, make_tensor_map(pd, "bfloat16", (rows_a, n), problem.d_stride, box, swizzle)
    for index, (_, tensor_map) in maps.items():
        args.set_tensor_map(index, tensor_map)
    launch = Launch(kernel, gemm_plan.launch, args, device_index)
    operand_of = {index: operand for index, (operand, _) in maps.items()}
    return Template(launch, args, (pa, psfa, pb, pd), operand_of)


def remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Add to a cache of launches, which is emptied when it is full."""
    if len(cache) >= MAX_ENTRIES:
        cache.clear()
    cache[key] = value
