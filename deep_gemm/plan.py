"""Problem -> GemmPlan: which kernel, how many CTAs. Pure Python: no torch, no CUDA."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from deep_gemm import grouped_cost
from deep_gemm.grouped_cost import GROUPED_CANDIDATES as GROUPED_CANDIDATES
from deep_gemm.types import BLOCK_K, GemmPlan, KernelConfig, LaunchConfig, Problem

SMEM_LIMIT = 232_448  # bytes of shared memory that one CTA can have on Hopper
# Tiles along M in a raster band: few keep the operands of long sums in L2, many those of short ones
# (measured: up to 1 % and 2 %).
RASTER_LONG_K, RASTER_SHORT_K = 12, 24
SHORT_K = 2048
GROUPED_BLOCK_M = 192  # at most: the scales of four rows more have to fit into a box of TMA


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel to choose from, and what it costs: one CTA's times with all SMs busy."""

    config: KernelConfig
    k_block_us: float  # microseconds per k-block of a tile
    tile_us: float  # microseconds per tile beside its k-blocks: mostly the epilogue


@dataclass(frozen=True, slots=True)
class CostModel:
    """Time of a launch in microseconds: its parts, and what all candidates have in common.

    Tiles are handed out in waves of one per SM; meanwhile operands come from DRAM once and from L2
    once per tile. The longest of the three bounds the launch, and hides most of the others.
    """

    launch_us: float  # start of the kernel, filling of the pipeline
    exposed: float  # share of the shorter of compute and traffic that the longer does not hide
    dram_bytes_per_us: float
    l2_bytes_per_us: float

    def time_us(self, work: Work, k_block_us: Any, tile_us: Any) -> Any:
        """Takes numbers, or (`benchmarks.fit`) NumPy arrays of many launches."""
        compute = work.waves * (work.k_blocks * k_block_us + tile_us)
        dram, l2 = work.dram_bytes / self.dram_bytes_per_us, work.l2_bytes / self.l2_bytes_per_us
        traffic = (dram + l2 + abs(dram - l2)) / 2  # the larger of the two, of arrays as well
        total, difference = compute + traffic, abs(compute - traffic)
        longer, shorter = (total + difference) / 2, (total - difference) / 2
        return self.launch_us + longer + self.exposed * shorter


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch has to do, in the cost model's units."""

    waves: Any  # of tiles, one per SM
    k_blocks: Any  # of each tile
    dram_bytes: Any  # operands and D, once
    l2_bytes: Any  # operands, once per tile


# Fitted by `benchmarks.fit` to 72 shapes x 141 configs timed on an H200; there the choice is
# within 1 % of the fastest of the 141 on average, 7.2 % off at worst (docs/design.md).
COST_MODEL = CostModel(
    launch_us=2.763, exposed=0.285, dram_bytes_per_us=4.75e6, l2_bytes_per_us=17.12e6
)
CANDIDATES = (
    Candidate(KernelConfig(64, 16, 1, 12, num_partials=4, slab_n=16, num_d_slabs=1), 0.0799, 0.300),
    Candidate(KernelConfig(64, 32, 1, 12, num_partials=4, slab_n=32, num_d_slabs=1), 0.0846, 0.341),
    Candidate(KernelConfig(64, 48, 1, 12, num_partials=4, slab_n=16, num_d_slabs=3), 0.1018, 0.538),
    Candidate(KernelConfig(64, 64, 1, 12, num_partials=4, slab_n=64, num_d_slabs=1), 0.1016, 0.613),
    Candidate(KernelConfig(64, 128, 1, 8, num_partials=2, slab_n=64, num_d_slabs=2), 0.1706, 0.701),
    Candidate(KernelConfig(128, 64, 2, 8, slab_n=64, num_d_slabs=1), 0.1913, 0.375),
    Candidate(KernelConfig(128, 96, 2, 7, num_partials=2, slab_n=32, num_d_slabs=3), 0.2667, 0.589),
    Candidate(KernelConfig(128, 128, 2, 5, slab_n=64, num_d_slabs=2), 0.3354, 0.474),
    Candidate(KernelConfig(128, 160, 2, 5, slab_n=32, num_d_slabs=5), 0.4195, 0.859),
    Candidate(KernelConfig(128, 192, 2, 5, slab_n=64, num_d_slabs=1), 0.4825, 0.898),
    Candidate(KernelConfig(192, 96, 3, 5, slab_n=32, num_d_slabs=3), 0.3838, 0.681),
    Candidate(KernelConfig(192, 128, 3, 4, slab_n=64, num_d_slabs=2), 0.4691, 0.615),
    Candidate(KernelConfig(192, 128, 3, 4, cluster_n=2, slab_n=64, num_d_slabs=2), 0.4901, 0.571),
    Candidate(KernelConfig(256, 128, 2, 4, cluster_n=2, slab_n=64, num_d_slabs=1), 0.6869, 0.988),
)


def units(problem: Problem, config: KernelConfig) -> int:
    """How many clusters' worth of tiles D has; the last ones may hang over its edge."""
    along_m = -(-problem.m // (config.block_m * config.cluster_m))
    along_n = -(-problem.n // (config.block_n * config.cluster_n))
    return along_m * along_n


def most_units(problem: Problem, config: KernelConfig) -> int:
    """As many units as there can be, whatever rows the groups have."""
    if not config.is_grouped:
        return units(problem, config)
    along_n = -(-problem.n // (config.block_n * config.cluster_n))
    along_m = -(-problem.m // config.block_m)
    if problem.kind == "masked":
        return problem.num_groups * along_m * along_n
    return (along_m + min(problem.num_groups, problem.m)) * along_n


def work_of(problem: Problem, config: KernelConfig, num_sms: int) -> Work:
    """Count what a launch has to do."""
    tiles = units(problem, config)
    k_blocks = -(-problem.k // BLOCK_K)
    rows = min(config.block_m, problem.m) / config.cluster_n + config.block_n / config.cluster_m
    return Work(
        waves=-(-tiles // (num_sms // config.cluster_size)),
        k_blocks=k_blocks,
        dram_bytes=(problem.m + problem.n) * problem.k + 2 * problem.m * problem.n,
        l2_bytes=tiles * config.cluster_size * rows * k_blocks * BLOCK_K,
    )


def predicted_us(problem: Problem, candidate: Candidate, num_sms: int) -> float:
    """Time of one launch in microseconds, as the cost model sees it."""
    work = work_of(problem, candidate.config, num_sms)
    return float(COST_MODEL.time_us(work, candidate.k_block_us, candidate.tile_us))


@functools.lru_cache(maxsize=65536)
def make_plan(
    problem: Problem, num_sms: int, pdl: bool = False, config: KernelConfig | None = None
) -> GemmPlan:
    """Choose the kernel for a problem, and how to launch it.

    Args:
        problem: a checked problem with m, n, k > 0.
        num_sms: SMs that the launch may occupy.
        pdl: ask for programmatic dependent launch.
        config: take this kernel instead of the best candidate, for experiments.

    Returns:
        The plan; its `predicted_us` is None for a `config` that is not a candidate.

    Raises:
        ValueError: `config` does not fit into shared memory or into `num_sms`.
    """
    if config is not None and (config.smem_bytes > SMEM_LIMIT or config.cluster_size > num_sms):
        raise ValueError(
            f"config needs {config.smem_bytes} bytes of shared memory and {config.cluster_size} "
            f"SMs for a cluster, expected at most {SMEM_LIMIT} and {num_sms}: {config}"
        )
    if problem.kind == "dense":
        predictions = {
            candidate.config: predicted_us(problem, candidate, num_sms)
            for candidate in CANDIDATES
            if candidate.config.cluster_size <= num_sms
        }
    else:
        predictions = {
            candidate.config: grouped_cost.predicted_us(problem, candidate, num_sms)
            for candidate in GROUPED_CANDIDATES
        }
    chosen = config or min(predictions, key=lambda choice: predictions[choice])
    clusters = min(most_units(problem, chosen), num_sms // chosen.cluster_size)
    launch = LaunchConfig(
        grid=clusters * chosen.cluster_size,
        threads=chosen.num_threads,
        smem_bytes=chosen.smem_bytes,
        cluster=chosen.cluster_size,
        pdl=pdl,
    )
    raster_m = RASTER_SHORT_K if problem.k <= SHORT_K else RASTER_LONG_K
    m = problem.expected_m if chosen.is_grouped else problem.m
    return GemmPlan(
        kernel=chosen,
        launch=launch,
        raster_m=raster_m // chosen.cluster_m,
        predicted_us=predictions.get(chosen),
        is_b_read_once=m <= chosen.block_m * chosen.cluster_m,
    )


def make_config(
    block_m: int,
    block_n: int,
    num_consumers: int,
    cluster_m: int = 1,
    cluster_n: int = 1,
    num_stages: int = 12,
    num_partials: int = 1,
    is_grouped: bool = False,
) -> KernelConfig:
    """For experiments: a tile with as many stages as fit, then as much staging of D as is left.

    Raises:
        ValueError: too little shared memory for the stages that a warpgroup holds at a time, or a
            tile too tall for a grouped kernel.
    """
    if is_grouped and block_m > GROUPED_BLOCK_M:
        raise ValueError(f"block_m is {block_m}, expected at most {GROUPED_BLOCK_M} if grouped")
    slab_n = next(n for n in (64, 32, 16) if block_n % n == 0)
    slabs_of_a_tile = block_m // (64 * num_consumers) * (block_n // slab_n)
    fewest = max(2, num_partials)
    for stages in range(num_stages, fewest - 1, -1):
        for slabs in range(slabs_of_a_tile, 0, -1):
            config = KernelConfig(
                block_m, block_n, num_consumers, stages, cluster_m, cluster_n,
                num_partials, slab_n, slabs, is_grouped,
            )  # fmt: skip
            if config.smem_bytes <= SMEM_LIMIT:
                return config
    raise ValueError(f"a {block_m} x {block_n} tile leaves no room for {fewest} stages")
