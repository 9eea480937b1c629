"""The frozen dataclasses that the steps of a call hand to each other; no torch, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

BLOCK_K = 128  # channels that share one scale; also the K extent of one pipeline stage
Backend = Literal["auto", "sm90", "reference"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One checked GEMM ``D[m, n] = A[m, k] @ B[n, k].T``: sizes, strides and place, no pointers.

    Strides are row strides in elements; ``sfb_strides`` are those of the weight scales along their
    n-block and k-block axes. ``device`` is a torch device string with an index ("cpu", "cuda:0").

    Grouped kinds have ``num_groups`` weights. "contiguous" and "psum": A and D have m rows for all
    groups together; "masked": each group has m rows of its own. ``expected_m`` is a guess at the
    rows that a group uses.
    """

    kind: Literal["dense", "contiguous", "psum", "masked"]
    m: int
    n: int
    k: int
    device: str
    a_stride: int
    b_stride: int
    d_stride: int
    sfb_strides: tuple[int, int]
    num_groups: int = 1
    expected_m: int = 0


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Every number that is compiled into a GEMM kernel; the same names, upper-cased, in CUDA."""

    block_m: int  # rows of D per tile: 64 * waves * num_consumers
    block_n: int  # columns of D per tile, a multiple of 16
    num_consumers: int  # consumer warpgroups, 1 to 3
    num_stages: int  # stages of the TMA pipeline
    cluster_m: int = 1  # CTAs side by side along M: they share, and multicast, B
    cluster_n: int = 1  # CTAs side by side along N: they share, and multicast, A
    num_partials: int = 1  # wgmma results in flight per consumer warpgroup, 1 to 4
    slab_n: int = 64  # columns of a staging slab of D (16, 32 or 64): 16 rows, one TMA store
    num_d_slabs: int = 2  # staging slabs of D per consumer warp, used as a ring
    is_grouped: bool = False  # rows belong to groups with weights of their own

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_consumers + 1)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage<Config>)``, which the kernel asserts."""
        sfa = -(-(self.block_m + (4 if self.is_grouped else 0)) // 32) * 32
        stage = (self.block_m + self.block_n) * BLOCK_K + sfa * 4 + 2 * 4 + 2 * 8
        staging = 4 * self.num_consumers * self.num_d_slabs * 16 * self.slab_n * 2
        queue = 1024 if self.is_grouped else 0
        return queue + -(-(self.num_stages * stage + staging) // 1024) * 1024

    def constants(self) -> dict[str, int]:
        """The ``struct Config`` of the generated source: field name upper-cased -> value."""
        names = [field.name for field in fields(self)] + ["num_threads", "smem_bytes"]
        return {name.upper(): getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """What one launch needs beside the kernel: sizes in CTAs, threads and bytes."""

    grid: int
    threads: int
    smem_bytes: int
    cluster: int = 1
    pdl: bool = False


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """The kernel that was chosen for a problem, how to launch it, and the predicted time."""

    kernel: KernelConfig
    launch: LaunchConfig
    raster_m: int  # height of a raster band in clusters
    predicted_us: float | None  # None: the config was given, not chosen
    is_b_read_once: bool = False  # by one tile each of its rows (as expected, if grouped)
