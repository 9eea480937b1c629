"""What a grouped launch costs: the kernels to choose from, and a model of their time.

How many rows a group has is known on the device only. The model takes sizes spread evenly from
0.7 to 1.3 times the expected one; a wrong guess costs time, never a result.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from deep_gemm.types import BLOCK_K, KernelConfig, Problem

SPREAD = 0.3  # of the groups' sizes around the expected one


@dataclass(frozen=True, slots=True)
class GroupedCandidate:
    """A kernel to choose from, and what one CTA takes with all SMs busy."""

    config: KernelConfig
    k_block_us: float  # microseconds per k-block of a tile of which every warpgroup has rows
    tile_us: float  # microseconds per tile beside its k-blocks: mostly the epilogue
    idle_share: float  # how much of its part a warpgroup without rows still costs


@dataclass(frozen=True, slots=True)
class GroupedCostModel:
    """What all candidates have in common."""

    launch_us: float  # start of the kernel, filling of the pipeline
    dram_bytes_per_us: float
    exposed: float  # share of the shorter of compute and traffic that the longer does not hide
    whole_waves: float  # how far tiles end in waves (1), or are spread evenly by drawing (0)


# Fitted by `benchmarks.grouped_fit` to 25 cases x 22 configs timed on an H200; there the choice is
# within 0.4 % of the fastest of the 22 on average, 1.7 % off at worst (docs/design.md).
GROUPED_COST_MODEL = GroupedCostModel(
    launch_us=1.10, dram_bytes_per_us=4.657e6, exposed=0.093, whole_waves=0.409
)
GROUPED_CANDIDATES = (
    GroupedCandidate(
        KernelConfig(64, 128, 1, 8, num_partials=2, num_d_slabs=2, is_grouped=True),
        k_block_us=0.2592, tile_us=0.330, idle_share=0.0,
    ),
    GroupedCandidate(
        KernelConfig(128, 128, 2, 6, num_partials=2, num_d_slabs=1, is_grouped=True),
        k_block_us=0.4191, tile_us=0.280, idle_share=0.662,
    ),
    GroupedCandidate(
        KernelConfig(128, 160, 2, 5, slab_n=32, num_d_slabs=5, is_grouped=True),
        k_block_us=0.5470, tile_us=0.546, idle_share=0.266,
    ),
    GroupedCandidate(
        KernelConfig(128, 192, 2, 5, num_d_slabs=1, is_grouped=True),
        k_block_us=0.6371, tile_us=0.389, idle_share=0.572,
    ),
    GroupedCandidate(
        KernelConfig(192, 128, 3, 4, num_d_slabs=2, is_grouped=True),
        k_block_us=0.6123, tile_us=0.385, idle_share=0.478,
    ),
)  # fmt: skip


def expected_tiles(problem: Problem, config: KernelConfig) -> Counter[int]:
    """How many tiles there are by the number of warpgroups that have rows in them."""
    along_n = -(-problem.n // config.block_n)
    tiles: Counter[int] = Counter()
    for group in range(problem.num_groups):
        share = (group + 0.5) / problem.num_groups * 2 - 1
        rows = max(1, round(problem.expected_m * (1 + SPREAD * share)))
        whole, rest = divmod(rows, config.block_m)
        tiles[config.num_consumers] += whole * along_n
        if rest:
            rows_per_warpgroup = config.block_m // config.num_consumers
            tiles[-(-rest // rows_per_warpgroup)] += along_n
    return +tiles


def predicted_us(
    problem: Problem,
    candidate: GroupedCandidate,
    num_sms: int,
    model: GroupedCostModel = GROUPED_COST_MODEL,
) -> float:
    """Time of one launch in microseconds, as the cost model sees it."""
    config = candidate.config
    k_blocks = -(-problem.k // BLOCK_K)
    tiles = expected_tiles(problem, config)

    def tile_us(warpgroups: int) -> float:
        used = warpgroups / config.num_consumers
        return candidate.tile_us + k_blocks * candidate.k_block_us * (
            used + (1 - used) * candidate.idle_share
        )

    count = sum(tiles.values())
    total_us = sum(number * tile_us(warpgroups) for warpgroups, number in tiles.items())
    clusters = num_sms // config.cluster_size
    spread_us = max(max(map(tile_us, tiles)), total_us / clusters)
    waves_us = -(-count // clusters) * total_us / count
    compute = (
        spread_us + model.whole_waves * (waves_us - spread_us) if count > clusters else spread_us
    )
    m = max(1, problem.expected_m)
    bytes_moved = problem.num_groups * (problem.n * problem.k + m * (problem.k + 2 * problem.n))
    traffic = bytes_moved / model.dram_bytes_per_us
    return model.launch_us + max(compute, traffic) + model.exposed * min(compute, traffic)
