"""Problem -> GemmPlan: which kernel, how many CTAs. Pure Python: no torch, no CUDA."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from deep_gemm.types import BLOCK_K, GemmPlan, KernelConfig, LaunchConfig, Problem

SMEM_LIMIT = 232_448  # bytes of shared memory that one CTA can have on Hopper
MAX_STAGES = 12


def make_config(
    block_m: int,
    block_n: int,
    num_consumers: int,
    cluster_m: int = 1,
    cluster_n: int = 1,
    num_stages: int | None = None,
) -> KernelConfig:
    """A tile with as many stages as fit, then as much staging for D as is left.

    Raises:
        ValueError: the tile does not fit into shared memory with two stages.
    """
    slab_n = next(n for n in (64, 32, 16) if block_n % n == 0)
    slabs_of_a_tile = block_m // (64 * num_consumers) * (block_n // slab_n)
    for stages in range(num_stages or MAX_STAGES, 1, -1):
        for slabs in range(slabs_of_a_tile, 0, -1):
            config = KernelConfig(
                block_m, block_n, num_consumers, stages, cluster_m, cluster_n, slab_n, slabs
            )
            if config.smem_bytes <= SMEM_LIMIT:
                return config
    raise ValueError(f"a {block_m} x {block_n} tile leaves no room for two stages")


def candidates() -> Iterator[KernelConfig]:
    """Every config that `make_plan` may choose, and so every kernel that there is to compile."""
    for cluster_m, cluster_n in ((1, 1), (2, 1), (1, 2)):
        for block_n in (16, 32, 48, 64, 80, 96, 112, 128):
            if block_n % (8 * cluster_m) == 0:
                yield make_config(64, block_n, 1, cluster_m, cluster_n)
        for block_n in (64, 96, 112, 128, 160, 192):
            yield make_config(128, block_n, 2, cluster_m, cluster_n)
        yield make_config(192, 128, 3, cluster_m, cluster_n)
        yield make_config(256, 128, 2, cluster_m, cluster_n)


# The cost model: clocks at CLOCK_MHZ. docs/design.md tells how the numbers were fitted.
CLOCK_MHZ = 1755
LAUNCH_CLOCKS = 4500
EPILOGUE_CLOCKS = 1200
L2_BYTES_PER_CLOCK = 40  # per SM
DRAM_BYTES_PER_CLOCK = 2500  # all SMs
TENSOR_EFFICIENCY = {1: 0.62, 2: 0.86, 3: 0.93}  # by consumer warpgroups: promotion hides or not


def predicted_us(problem: Problem, config: KernelConfig, num_sms: int) -> float:
    """Time that the cost model expects of one launch, in microseconds."""
    m_units = -(-problem.m // (config.block_m * config.cluster_m))
    n_units = -(-problem.n // (config.block_n * config.cluster_n))
    waves = -(-m_units * n_units // (num_sms // config.cluster_size))
    k_blocks = -(-problem.k // BLOCK_K)
    rows = min(config.block_m, problem.m)
    tensor = config.block_m * config.block_n / 32 / TENSOR_EFFICIENCY[config.num_consumers]
    loads = (rows / config.cluster_n + config.block_n / config.cluster_m) * BLOCK_K
    per_k_block = max(tensor, loads / L2_BYTES_PER_CLOCK, 300)
    store = EPILOGUE_CLOCKS + rows * config.block_n * 2 / L2_BYTES_PER_CLOCK
    compute = waves * (k_blocks * per_k_block + store)
    traffic = (problem.m + problem.n) * problem.k + 2 * problem.m * problem.n
    return (LAUNCH_CLOCKS + max(compute, traffic / DRAM_BYTES_PER_CLOCK)) / CLOCK_MHZ


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

    Raises:
        ValueError: `config` does not fit into shared memory or into `num_sms`.
    """
    if config is None:
        fitting = (c for c in candidates() if c.cluster_size <= num_sms)
        config = min(fitting, key=lambda c: predicted_us(problem, c, num_sms))
    if config.smem_bytes > SMEM_LIMIT or config.cluster_size > num_sms:
        raise ValueError(
            f"{config} needs {config.smem_bytes} bytes of shared memory and clusters of "
            f"{config.cluster_size} SMs; there are {SMEM_LIMIT} bytes and {num_sms} SMs"
        )
    m_units = -(-problem.m // (config.block_m * config.cluster_m))
    n_units = -(-problem.n // (config.block_n * config.cluster_n))
    clusters = min(m_units * n_units, num_sms // config.cluster_size)
    launch = LaunchConfig(
        grid=clusters * config.cluster_size,
        threads=config.num_threads,
        smem_bytes=config.smem_bytes,
        cluster=config.cluster_size,
        pdl=pdl,
    )
    return GemmPlan(
        config, launch, max(1, 16 // config.cluster_m), predicted_us(problem, config, num_sms)
    )
