"""Time explicit kernel configs on each shape: where the cost model's numbers come from.

    python -m benchmarks.search --shapes '64x*,4096x2112x7168' --out sweep.json

CUDA events, so a kernel's launch is included; for choosing between configs that does no harm.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines import Inputs, Weight
from benchmarks.cases import by_weight, dense_cases
from benchmarks.dense import KERNEL, planned
from benchmarks.timing import Call, L2Flush
from deep_gemm import gemm, jit, plan, reference
from deep_gemm.jit import CompileError
from deep_gemm.types import KernelConfig

FIRST_CALLS, MORE_CALLS = 3, 7
GIVE_UP = 1.3  # times the best median so far
MAX_ERROR = 5e-3  # relative; a dead tile among 16384 is 8e-3, rounding to bf16 about 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", help="shapes MxNxK with wildcards, separated by commas")
    parser.add_argument("--configs", type=Path, help="JSON list of KernelConfig fields")
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    options = parser.parse_args()
    configs = compiled(load_configs(options.configs) if options.configs else grid())
    flush = L2Flush()
    results = []
    for (n, k), group in by_weight(dense_cases(options.shapes)).items():
        weight = Weight(n, k, "cuda")
        for case in group:
            found = search(Inputs(case, weight), configs, flush)
            results.append({"m": case.m, "n": n, "k": k, **found})
            print(case, *(f"{each['us']:.1f} us {each['config']}" for each in found["timed"][:1]))
    options.out.write_text(json.dumps(results, indent=1))


def grid() -> list[KernelConfig]:
    """Tiles, clusters and partials whose accumulators fit into the consumers' registers."""
    configs = []
    shapes = itertools.product((64, 128, 192, 256), range(16, 193, 16), ((1, 1), (2, 1), (1, 2)))
    for block_m, block_n, cluster in shapes:
        for consumers, partials in itertools.product((1, 2, 3), (1, 2, 4)):
            waves, rest = divmod(block_m, 64 * consumers)
            registers = (waves + partials) * block_n // 2
            if rest or waves > 2 or registers > (128 if consumers == 3 else 192):
                continue
            with contextlib.suppress(ValueError):  # too large for shared memory
                configs.append(
                    plan.make_config(block_m, block_n, consumers, *cluster, num_partials=partials)
                )
    return configs


def compiled(configs: Sequence[KernelConfig]) -> list[KernelConfig]:
    """Those configs that compile, compiled on all cores; the others are named."""

    def build(config: KernelConfig) -> bool:
        try:
            jit.build(KERNEL, config.constants())
        except CompileError as error:
            print(f"left out: {config}: {str(error).splitlines()[0]}")
            return False
        return True

    with ThreadPoolExecutor() as pool:
        built = list(pool.map(build, configs))
    return list(itertools.compress(configs, built))


def load_configs(path: Path) -> list[KernelConfig]:
    """A list of objects with `KernelConfig`'s fields, or of `make_config`'s arguments."""
    return [
        KernelConfig(**each) if "num_d_slabs" in each else plan.make_config(**each)
        for each in json.loads(path.read_text())
    ]


def search(inputs: Inputs, configs: Sequence[KernelConfig], flush: Call) -> dict[str, Any]:
    """Median microseconds of each config, best first; those that failed or were wrong apart.

    `calls` tells how many calls a median is of: slow configs are dropped after the first three.
    `planned` is the config that an ordinary call would use.
    """
    (a, sfa), (b, sfb) = inputs.rows, inputs.weight.blocks
    expected = torch.empty_like(inputs.d)
    reference.gemm_nt(a, sfa, b, sfb, expected)
    timed: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    best = float("inf")
    for config in configs:

        def call(config: KernelConfig = config) -> None:
            gemm.run_dense(inputs.rows, inputs.weight.blocks, inputs.d, config)

        inputs.d.fill_(float("nan"))
        try:
            call()
        except (RuntimeError, ValueError) as error:
            failed.append({"config": asdict(config), "error": str(error)})
            continue
        off = float((inputs.d.float() - expected.float()).norm() / expected.float().norm())
        if not off <= MAX_ERROR:
            failed.append({"config": asdict(config), "error": f"relative error {off:.2e}"})
            continue
        samples = _event_times(call, FIRST_CALLS, flush)
        if statistics.median(samples) <= GIVE_UP * best:
            samples += _event_times(call, MORE_CALLS, flush)
        us = statistics.median(samples)
        best = min(best, us)
        timed.append({"config": asdict(config), "us": us, "calls": len(samples)})
    timed.sort(key=lambda each: each["us"])
    return {"planned": asdict(planned(inputs.case)), "timed": timed, "failed": failed}


def _event_times(call: Call, repeats: int, flush: Call) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        flush()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


if __name__ == "__main__":
    main()
