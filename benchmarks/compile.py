"""Cold compile time of every kernel that the dense shapes use; needs no GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.cases import Case, by_weight
from benchmarks.dense import KERNEL, Track, planned
from benchmarks.results import Row, make_row
from benchmarks.timing import Figures
from deep_gemm.jit.codegen import KernelSource, make_source
from deep_gemm.jit.compiler import compile_cubin
from deep_gemm.types import KernelConfig


def run_compile(cases: Sequence[Case], repeats: int = 3, track: Track = iter) -> list[Row]:
    """Microseconds of one compiler run per distinct kernel, on one core, past every cache.

    One row a kernel with the first weight shape that needs it, then one row a weight shape, whose
    `groups` is the number of kernels that its m in `cases` need, and whose time is their sum.
    """
    os.environ["CUDA_CACHE_DISABLE"] = "1"  # NVRTC's own cache, which it has where a driver is
    times: dict[KernelConfig, Figures] = {}
    kernel_rows, weight_rows = [], []
    for (n, k), group in track(list(by_weight(cases).items())):
        configs = dict.fromkeys(planned(case) for case in group)
        for each in configs:
            if each in times:
                continue
            source = make_source(KERNEL, each.constants())
            if not times:
                compile_cubin(source)  # loads the compiler, which is not what is measured
            times[each] = Figures.of([_timed(source) for _ in range(repeats)])
            kernel_rows.append(make_row("compile", times[each], n=n, k=k, config=asdict(each)))
        total = Figures.of([sum(times[each].us for each in configs)])
        weight_rows.append(make_row("compile all listed m", total, n=n, k=k, groups=len(configs)))
    return kernel_rows + weight_rows


def _timed(source: KernelSource) -> float:
    began = time.perf_counter()
    compile_cubin(source)
    return (time.perf_counter() - began) * 1e6
