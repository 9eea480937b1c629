"""The dense suite: kernel time of each shape, and the sustained mode."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Protocol

import torch

import deep_gemm
from benchmarks.baselines import Inputs, Weight
from benchmarks.cases import YARDSTICK, Case, by_weight, peer_row
from benchmarks.results import Row, gemm_row, ratio_to_deepgemm
from benchmarks.timing import REPEATS, Call, Figures, GpuMonitor, Measurement, Timer
from deep_gemm import jit, plan, reference
from deep_gemm.testing import compare
from deep_gemm.types import KernelConfig, Problem

TOLERANCE = 1e-4  # of squares: a wrong tile or row is off by 1, the tensor core's rounding by 1e-6
KERNEL = "fp8_gemm_1d2d"
BATCH_SECONDS = 0.1

Track = Callable[[Sequence[Any]], Iterable[Any]]  # as rich.progress.track


class SessionLike(Protocol):
    def measure(self, calls: Sequence[Call], repeats: int = REPEATS) -> Measurement: ...


class TimerLike(Protocol):
    def session(self) -> AbstractContextManager[SessionLike]: ...


def run_dense(
    cases: Sequence[Case], timer: TimerLike, device: str = "cuda", track: Track = iter
) -> tuple[list[Row], float]:
    """Measure our kernel and the baselines, interleaved, on every case.

    Returns the rows and the yardstick's time in microseconds. Raises AssertionError where a result
    is wrong: a figure of a wrong kernel is worth nothing.
    """
    precompile(cases)
    yardstick_us = measure_yardstick(timer, device)
    rows = []
    for (n, k), group in track(list(by_weight(cases).items())):
        weight = Weight(n, k, device)
        inputs = [Inputs(case, weight) for case in group]
        calls = [checked_calls(each) for each in inputs]
        with timer.session() as session:
            measurements = [session.measure(each) for each in calls]
        for case, measurement in zip(group, measurements, strict=True):
            ours, tensor, *block = measurement.figures
            deepgemm_us = peer_row("dense", case).get("deepgemm_us")
            rows.append(
                gemm_row(
                    case,
                    ours,
                    tensor.us,
                    cublaslt_block_us=block[0].us if block else None,
                    ratio_to_deepgemm=ratio_to_deepgemm(deepgemm_us, ours.us, yardstick_us),
                    sm_mhz=measurement.sm_mhz,
                    power_w=measurement.power_w,
                    config=asdict(planned(case)),
                )
            )
    return rows, yardstick_us


def run_sustained(
    cases: Sequence[Case], timer: Timer, seconds: float = 1.0, track: Track = iter
) -> tuple[list[Row], float]:
    """Each call back to back for about `seconds`, without flushes: what the power limit leaves.

    Returns the rows and the yardstick's time (measured with flushes, before) in microseconds.
    """
    precompile(cases)
    yardstick_us = measure_yardstick(timer)
    rows = []
    for case in track(cases):
        calls = checked_calls(Inputs(case, Weight(case.n, case.k, "cuda")))
        (us, mhz, watts), (tensor_us, *_), *block = (
            _back_to_back(call, timer.monitor, seconds) for call in calls
        )
        deepgemm_tflops = peer_row("sustained_tflops", case).get("deepgemm_tflops")
        deepgemm_us = case.flops / deepgemm_tflops / 1e6 if deepgemm_tflops else None
        rows.append(
            gemm_row(
                case,
                Figures.of([us]),
                tensor_us,
                cublaslt_block_us=block[0][0] if block else None,
                ratio_to_deepgemm=ratio_to_deepgemm(deepgemm_us, us, yardstick_us),
                sm_mhz=mhz,
                power_w=watts,
                config=asdict(planned(case)),
            )
        )
    return rows, yardstick_us


def checked_calls(inputs: Inputs) -> list[Call]:
    """Ours, per-tensor and (where it works) block-scaled: warm, the first and the last verified."""
    expected = torch.empty_like(inputs.d)
    (a, sfa), (b, sfb) = inputs.rows, inputs.weight.blocks
    reference.gemm_nt(a, sfa, b, sfb, expected)
    inputs.d.fill_(float("nan"))
    inputs.ours()
    compare(inputs.d, expected, tol=TOLERANCE, name=f"fp8_gemm_nt {inputs.case}")
    calls: list[Call] = [inputs.ours, inputs.scaled_mm_tensor]
    if (block := inputs.scaled_mm_block()) is not None:
        try:
            compare(block(), expected, tol=TOLERANCE, name=f"scaled_mm {inputs.case}")
        except AssertionError as error:
            warnings.warn(f"left out, since it is wrong: {error}", stacklevel=2)
        else:
            calls.append(block)
    for call in calls:
        call()
    return calls


def measure_yardstick(timer: TimerLike, device: str = "cuda") -> float:
    """`torch._scaled_mm` at 4096x4096x7168: tells how fast this GPU is today."""
    call = Inputs(YARDSTICK, Weight(YARDSTICK.n, YARDSTICK.k, device)).scaled_mm_tensor
    for _ in range(5):
        call()
    with timer.session() as session:
        measurement = session.measure([call])
    return measurement.figures[0].us


def planned(case: Case) -> KernelConfig:
    """The kernel that a call of this case uses on the current GPU, or on one of an H200's size."""
    problem = Problem(
        kind="dense",
        m=case.m,
        n=case.n,
        k=case.k,
        device="cuda:0",
        a_stride=case.k,
        b_stride=case.k,
        d_stride=case.n,
        sfb_strides=(-(-case.k // 128), 1),
    )
    return plan.make_plan(problem, deep_gemm.get_num_sms()).kernel


def precompile(cases: Sequence[Case]) -> None:
    """Compile the kernels of all cases on all cores; the compiler runs outside Python's lock."""
    configs = {planned(case) for case in cases}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda each: jit.build(KERNEL, each.constants()), configs))


def _back_to_back(
    call: Call, monitor: GpuMonitor, seconds: float
) -> tuple[float, int | None, float | None]:
    """(microseconds per call, SM MHz, W); clock and power sampled while the GPU is busy."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    batch = max(1, round(20 * BATCH_SECONDS / (time.perf_counter() - began)))
    batches = max(3, round(seconds / BATCH_SECONDS))
    samples = []
    done = [torch.cuda.Event() for _ in range(batches)]
    start.record()
    for index in range(batches):
        for _ in range(batch):
            call()
        done[index].record()
        if index >= 2:  # two batches stay queued, so that the GPU never waits for the host
            done[index - 2].synchronize()
            samples.append(monitor.sample())
    end.record()
    torch.cuda.synchronize()
    us = start.elapsed_time(end) * 1e3 / (batch * batches)
    clocks = [mhz for mhz, _ in samples if mhz is not None]
    powers = [watts for _, watts in samples if watts is not None]
    return (
        us,
        round(statistics.mean(clocks)) if clocks else None,
        statistics.mean(powers) if powers else None,
    )
