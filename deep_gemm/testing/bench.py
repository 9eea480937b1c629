"""Timing of functions that launch GPU work: by CUDA events, and per kernel by the profiler."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from deep_gemm.config import settings

_L2_FLUSH_BYTES = 512 << 20  # several times any GPU's L2


def bench(
    fn: Callable[[], object],
    num_warmups: int = 5,
    num_tests: int = 10,
    high_precision: bool = False,
) -> float:
    """Seconds of GPU time per call of `fn`, by CUDA events around `num_tests` calls.

    The calls run back to back after the L2 cache was flushed once; gaps between kernels count.
    `high_precision` keeps the GPU busy first, so that launches are queued before timing starts.
    """
    for _ in range(num_warmups):
        fn()
    _flush_l2()
    if high_precision:
        busy = torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")
        busy @ busy
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_tests):
        fn()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / num_tests / 1e3


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    with_multiple_kernels: bool = False,
    barrier: Callable[[], object] | None = None,
    *,
    barrier_comm_profiling: bool = False,
) -> Any:
    """Mean seconds per launch of the kernels whose name contains each of `kernel_names`.

    One name gives a float, a tuple of names a tuple of floats. The profiler runs `num_tests` calls
    to warm up and as many to measure, each after `barrier()` (if any) and an L2 flush by reading.
    A name that matches several kernels is an error unless `with_multiple_kernels`, where the mean
    is over all their launches. Chrome's trace goes to `trace_path`. `barrier_comm_profiling`, the
    2025 keyword, is `barrier=torch.distributed.barrier`.

    Under another profiler (`DG_USE_NVIDIA_TOOLS` or `DG_NSYS_PROFILING` set to 1) `fn` just runs
    and every time is 1. Raises RuntimeError where no kernel matches.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    if barrier_comm_profiling:
        barrier = torch.distributed.barrier

    def run() -> None:
        for _ in range(num_tests):
            if flush_l2:
                _flush_l2()
            if barrier is not None:
                barrier()
            fn()
        torch.cuda.synchronize()

    if settings.use_nvidia_tools:
        run()
        seconds = [1.0] * len(names)
    else:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
        silence = _silence() if suppress_kineto_output else contextlib.nullcontext()
        with silence, torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
            for _ in range(2):
                run()
                profiler.step()
        if trace_path is not None:
            profiler.export_chrome_trace(trace_path)
        durations = kernel_durations(profiler.events())
        seconds = [mean_duration(durations, name, with_multiple_kernels) for name in names]
    return seconds[0] if isinstance(kernel_names, str) else tuple(seconds)


def kernel_durations(events: Iterable[Any]) -> dict[str, list[float]]:
    """Seconds of every launch by full kernel name, from the profiler's event objects."""
    durations = defaultdict(list)
    for event in events:
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
            durations[event.name].append(event.time_range.elapsed_us() * 1e-6)
    return durations


def mean_duration(durations: dict[str, list[float]], name: str, several: bool = False) -> float:
    """Mean of the launches whose kernel name contains `name`; `several` kernels may match."""
    matches = [kernel for kernel in durations if name in kernel]
    if not matches:
        raise RuntimeError(
            f"no kernel named {name!r} ran; these did: {sorted(durations) or 'none'}"
        )
    if len(matches) > 1 and not several:
        raise RuntimeError(
            f"{name!r} matches {len(matches)} kernels, expected one: {sorted(matches)}; "
            f"with_multiple_kernels=True averages over them"
        )
    launches = [seconds for kernel in matches for seconds in durations[kernel]]
    return sum(launches) / len(launches)


def _flush_l2() -> None:
    # read, not written: dirty lines would be written back while the kernel under test runs
    torch.empty(_L2_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda").amax()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Send both output streams to nowhere, those of the profiler's C++ part too."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(stream, os.dup(stream)) for stream in (1, 2)]
    try:
        with open(os.devnull, "w") as nowhere:
            for stream, _ in saved:
                os.dup2(nowhere.fileno(), stream)
        yield
    finally:
        for stream, copy in saved:
            os.dup2(copy, stream)
            os.close(copy)
