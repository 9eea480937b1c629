"""Around the kernel: streams, graphs, threads, forks, devices, failures, and what a call costs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_tools import CONFIGS, DEFECTS, Operands, check, make_operands, with_config

import deep_gemm
from deep_gemm import driver, gemm, jit, plan
from deep_gemm.jit import codegen
from deep_gemm.testing import assert_bitwise_equal, compare
from deep_gemm.types import GemmPlan

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
SIZES = 130, 520, 1040


def empty(m: int = SIZES[0], n: int = SIZES[1], device: str = "cuda") -> torch.Tensor:
    return torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)


def run(operands: Operands) -> torch.Tensor:
    m, n, _ = operands.sizes
    d = empty(m, n)
    deep_gemm.fp8_gemm_nt(*operands, d)
    return d


def copy(target: Operands, source: Operands) -> None:
    for pair, other in zip(target, source, strict=True):
        for tensor, values in zip(pair, other, strict=True):
            tensor.copy_(values)


# Streams and graphs


@pytest.mark.parametrize("row_major", [False, True])
def test_a_graph_replays_with_new_contents(row_major: bool) -> None:
    first, second = make_operands(*SIZES), make_operands(*SIZES, seed=1)
    expected = run(first), run(second)
    operands = make_operands(*SIZES)
    a = operands.a[0], operands.a[1].contiguous() if row_major else operands.a[1]
    d = empty()
    deep_gemm.fp8_gemm_nt(a, operands.b, d)  # compiles what the graph needs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            deep_gemm.fp8_gemm_nt(a, operands.b, d)
    for source, result in zip((second, first, second), (*expected[::-1], expected[1]), strict=True):
        copy(Operands(a, operands.b), source)
        d.fill_(float("nan"))
        graph.replay()
        assert_bitwise_equal(d, result)


def test_a_graph_with_dependent_launches() -> None:
    operands = make_operands(*SIZES)
    expected = run(operands)
    deep_gemm.set_pdl(True)
    d = empty()
    deep_gemm.fp8_gemm_nt(*operands, d)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            deep_gemm.fp8_gemm_nt(*operands, d)
    d.fill_(float("nan"))
    graph.replay()
    assert_bitwise_equal(d, expected)


def test_the_current_stream_is_used() -> None:
    """Operands that another stream makes late, and a result that it reads at once."""
    late = make_operands(*SIZES)
    expected = run(late)
    operands = make_operands(*SIZES, seed=1)
    d, result = empty(), empty()
    deep_gemm.fp8_gemm_nt(*operands, d)  # remembered, for the default stream
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        copy(operands, late)
        deep_gemm.fp8_gemm_nt(*operands, d)
        result.copy_(d)
    assert not stream.query(), "the sleep was too short to prove anything"
    stream.synchronize()
    assert_bitwise_equal(result, expected)


def test_two_threads_on_two_streams() -> None:
    cases = [
        [make_operands(m, n, k, seed=seed) for m, n, k in ((130, 520, 1040), (7, 264, 2048))]
        for seed in range(2)
    ]
    expected = [[run(operands) for operands in each] for each in cases]
    torch.cuda.synchronize()
    jit.forget()  # so that both want the same kernels at the same time
    deep_gemm.set_pdl(False)  # a new epoch: no launch is remembered
    results: list[list[torch.Tensor]] = [[], []]
    barrier = threading.Barrier(2)

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            barrier.wait()
            for _ in range(50):
                results[index] += [run(operands) for operands in cases[index]]
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert len(results[index]) == 100
        for i, d in enumerate(results[index]):
            assert_bitwise_equal(d, expected[index][i % 2], f"thread {index}, call {i}")


# Processes and devices

FORK = """
import os, sys, torch, deep_gemm
sys.path.insert(0, "tests")
from dense_tools import CONFIGS, check, make_operands
deep_gemm.jit.build("fp8_gemm_1d2d", CONFIGS[0].constants())  # a lock was held, a compiler loaded
child = os.fork()
check(make_operands(130, 520, 1040))  # in both
torch.cuda.synchronize()
if child == 0:
    os._exit(0)
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status))
"""


def test_fork_after_import_then_use_in_both() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "child 0" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("device", [0, 1])
def test_tensors_on_any_device_whichever_is_current(current: int, device: int) -> None:
    expected = run(make_operands(*SIZES)).cpu()
    operands = Operands(
        *(tuple(t.to(f"cuda:{device}") for t in pair) for pair in make_operands(*SIZES))
    )
    d = empty(device=f"cuda:{device}")
    with torch.cuda.device(current):
        for _ in range(2):
            deep_gemm.fp8_gemm_nt(*operands, d)
        assert torch.cuda.current_device() == current
    assert_bitwise_equal(d.cpu(), expected)


# Failures


@pytest.mark.parametrize(
    "wrong, status",
    [
        ({"smem_bytes": 300_000}, "shared memory: CUDA_ERROR_INVALID_VALUE"),
        ({"threads": 4096}, "cuLaunchKernelEx: CUDA_ERROR_INVALID"),
        ({"grid": 0}, "cuLaunchKernelEx: CUDA_ERROR_INVALID"),
        ({"grid": 3, "cluster": 2}, "cuLaunchKernelEx: CUDA_ERROR_INVALID"),
    ],
    ids=str,
)
def test_a_launch_that_fails_is_an_error(
    wrong: dict[str, int], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = make_operands(*SIZES)
    expected = run(operands)
    make_plan = plan.make_plan

    def forged(*arguments: Any) -> GemmPlan:
        good = make_plan(*arguments)
        return dataclasses.replace(good, launch=dataclasses.replace(good.launch, **wrong))

    deep_gemm.set_num_sms(0)  # a new epoch: no launch is remembered
    with monkeypatch.context() as patch:
        patch.setattr(plan, "make_plan", forged)
        for _ in range(2):  # a failure is not remembered either
            with pytest.raises(driver.DriverError, match=status):
                deep_gemm.fp8_gemm_nt(*operands, empty())
    deep_gemm.set_num_sms(0)
    assert_bitwise_equal(run(operands), expected)


def test_a_kernel_that_does_not_compile_is_an_error_and_no_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect = DEFECTS[0]._replace(file="fp8_gemm_1d2d.cuh", old="#pragma once", new="#error planted")
    monkeypatch.setattr(codegen, "KERNELS", defect.break_kernels(tmp_path / "kernels"))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_cubins", {})
    monkeypatch.setattr(jit, "_kernels", {})
    deep_gemm.set_num_sms(0)  # a new epoch: no launch is remembered
    assert deep_gemm.get_backend() == "auto"
    d = empty()
    with pytest.raises(jit.CompileError, match="planted"):
        deep_gemm.fp8_gemm_nt(*make_operands(*SIZES), d)
    assert d.isnan().all()


# What a call costs


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_no_synchronisation_and_no_allocation_in_the_steady_state(
    no_synchronisation: None,
) -> None:
    operands, other = make_operands(*SIZES), make_operands(*SIZES, seed=1)
    d, d2 = empty(), empty()

    def count() -> tuple[int, int]:
        stats = torch.cuda.memory_stats()
        return stats["allocation.all.allocated"], stats["num_alloc_retries"]

    deep_gemm.fp8_gemm_nt(*operands, d)
    before, compiled = count(), jit.counters()
    torch.cuda._sleep(3_000_000_000)  # a second and more; a call that waits for the GPU takes it
    begin = time.perf_counter()
    for _ in range(10):
        deep_gemm.fp8_gemm_nt(*operands, d)
        deep_gemm.fp8_gemm_nt(*other, d2)  # new addresses only
    seconds = time.perf_counter() - begin
    assert not torch.cuda.current_stream().query(), "the sleep was too short to prove anything"
    assert seconds < 0.5
    assert count() == before
    assert jit.counters() == compiled


def test_scales_that_are_transposed_do_not_synchronise(no_synchronisation: None) -> None:
    (a, sfa), b = make_operands(*SIZES)
    for _ in range(3):
        deep_gemm.fp8_gemm_nt((a, sfa.contiguous()), b, empty())


# The reference backend


def test_the_reference_backend_on_a_gpu_is_that_of_the_cpu() -> None:
    for fill in ("normal", "integers"):
        operands = make_operands(70, 136, 400, fill)
        on_cpu = Operands(*(tuple(t.cpu() for t in pair) for pair in operands))
        expected = empty(70, 136, "cpu")
        deep_gemm.fp8_gemm_nt(*on_cpu, expected)
        deep_gemm.set_backend("reference")
        d = empty(70, 136)
        launched = len(gemm._launches)
        deep_gemm.fp8_gemm_nt(*operands, d)
        assert len(gemm._launches) == launched
        deep_gemm.set_backend(None)
        if fill == "integers":  # no sum is rounded
            assert_bitwise_equal(d.cpu(), expected)
        else:
            compare(d.cpu(), expected, tol=1e-6, row_tol=4e-5)


def test_every_config_runs_with_dependent_launches_and_without() -> None:
    operands = make_operands(300, 392, 528)
    for config in CONFIGS:
        expected = check(operands, with_config(config))
        deep_gemm.set_pdl(True)
        for _ in range(5):
            assert_bitwise_equal(check(operands, with_config(config)), expected, str(config))
        deep_gemm.set_pdl(False)
