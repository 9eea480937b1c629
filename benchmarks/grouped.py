"""The grouped suite: kernel time of the contiguous, masked and prefix-sum layouts."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import deep_gemm
from benchmarks.cases import peers
from benchmarks.dense import KERNEL, TOLERANCE, TimerLike, Track, measure_yardstick
from benchmarks.grouped_cases import Data, GroupedCase, Operands, aligned, by_family
from benchmarks.results import Row, make_row, ratio_to_deepgemm
from benchmarks.timing import Call, Figures
from deep_gemm import grouped_gemm, jit, plan
from deep_gemm.testing import compare
from deep_gemm.types import KernelConfig, Problem

RANKING_REPEATS = 3  # for choosing among builds of the Triton kernel


def run_grouped(
    cases: Sequence[GroupedCase],
    timer: TimerLike,
    device: str = "cuda",
    track: Track = iter,
    triton: bool = True,
) -> tuple[list[Row], float]:
    """Measure our kernel on every case, and a Triton kernel where the peers have no figure for one.

    Returns the rows, in the order of `cases`, and the yardstick's time in microseconds. Raises
    AssertionError where a result of ours is wrong.
    """
    module = _triton_module() if triton else None
    precompile(cases, module)
    yardstick_us = measure_yardstick(timer, device)
    rows: dict[GroupedCase, Row] = {}
    for family, members in track(list(by_family(cases).items())):
        data = Data(family, device)
        operands = [Operands(case, data) for case in members]
        for each in operands:
            check(each, each.ours, f"grouped GEMM {each.case}")
        calls = [[each.ours, *best_triton(each, module, timer)] for each in operands]
        measurements = []
        with timer.session() as session:
            for case, mine in zip(members, calls, strict=True):
                with aligned(case):
                    measurements.append(session.measure(mine))
        for case, measurement in zip(members, measurements, strict=True):
            ours, *others = measurement.figures
            rows[case] = grouped_row(
                case,
                ours,
                yardstick_us,
                own_triton_us=others[0].us if others else None,
                sm_mhz=measurement.sm_mhz,
                power_w=measurement.power_w,
                config=asdict(planned(case)),
            )
    return [rows[case] for case in cases], yardstick_us


def check(operands: Operands, call: Call, name: str) -> None:
    """Run a call, which leaves it warm, and hold every row of D against the reference."""
    with aligned(operands.case):
        results = operands.results(call)
    compare(results, operands.data.expected, tol=TOLERANCE, name=name)


def best_triton(operands: Operands, module: Any, timer: TimerLike) -> list[Call]:
    """The fastest right build of the Triton kernel, or none where it is not wanted."""
    case = operands.case
    if module is None or case.peer:
        return []
    groups = operands.grouped_layout if case.layout == "masked" else case.spans
    calls = []
    for tile in module.tiles_for(max(case.family.sizes)):
        try:
            call = module.make_call(tile, operands.a, operands.b, operands.d, groups)
            check(operands, call, f"Triton {tile} {case}")
        except Exception as error:  # a baseline that fails is left out, whatever Triton raises
            warnings.warn(f"left out: {tile} on {case}: {error}", stacklevel=2)
        else:
            calls.append(call)
    if not calls:
        return []
    with timer.session() as session:
        measurement = session.measure(calls, RANKING_REPEATS)
    times = [figures.us for figures in measurement.figures]
    return [calls[times.index(min(times))]]


def grouped_row(
    case: GroupedCase,
    figures: Figures,
    yardstick_us: float,
    own_triton_us: float | None = None,
    **values: Any,
) -> Row:
    """A row of one grouped GEMM, with what follows from its time."""
    family, peer = case.family, case.peer
    masked = case.layout == "masked"
    day = yardstick_us / float(peers()["yardstick_us"]["us"])  # of the GPU's clock: above 1 slower
    source = "peer" if peer else "own" if own_triton_us else None
    return make_row(
        f"m_grouped_fp8_gemm_nt_{'masked' if masked else 'contiguous'}",
        figures,
        layout=case.layout,
        recipe="1,128,128",
        m=case.m,
        n=family.n,
        k=family.k,
        groups=family.groups,
        m_per_group=family.m_per_group,
        tokens=case.tokens,
        tflops=case.flops / figures.us / 1e6,
        gb_per_s=case.bytes / figures.us / 1e3,
        ratio_to_deepgemm=ratio_to_deepgemm(peer.get("deepgemm_us"), figures.us, yardstick_us),
        triton_us=peer["triton_us"] * day if peer else own_triton_us,
        triton_source=source,
        floor_us=case.floor_us,
        **values,
    )


def planned(case: GroupedCase) -> KernelConfig:
    """The kernel that a call of this case uses on the current GPU, or on one of an H200's size."""
    family = case.family
    expected_m = grouped_gemm._rounded_hint(family.m_per_group)
    problem = Problem(
        kind=case.layout,
        m=case.m,
        n=family.n,
        k=family.k,
        device="cuda:0",
        a_stride=family.k,
        b_stride=family.k,
        d_stride=family.n,
        sfb_strides=(-(-family.k // 128), 1),
        num_groups=family.groups,
        expected_m=-(-case.m // family.groups) if case.layout == "contiguous" else expected_m,
    )
    return plan.make_plan(problem, deep_gemm.get_num_sms()).kernel


def precompile(cases: Sequence[GroupedCase], triton_module: Any = None) -> None:
    """Compile the kernels of all cases, and Triton's, on all cores."""
    configs = {planned(case) for case in cases}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(jit.build, KERNEL, each.constants()) for each in configs]
        if triton_module is not None and not all(case.peer for case in cases):
            for tile, masked in itertools.product(triton_module.TILES, (True, False)):
                pool.submit(triton_module.precompile, tile, masked)  # fails again when it is used
    for job in jobs:
        job.result()


def _triton_module() -> Any:
    try:
        from benchmarks import triton_grouped
    except ImportError as error:
        warnings.warn(f"no Triton baseline: {error}", stacklevel=2)
        return None
    return triton_grouped
