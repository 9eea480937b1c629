"""Host time per call: what the CPU spends, and so the least time between two small kernels."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

import deep_gemm
from benchmarks.baselines import Inputs, Pair, Weight
from benchmarks.cases import Case
from benchmarks.results import Row, make_row
from benchmarks.timing import Call, Figures

CASE = Case(64, 576, 7168)  # kernels of 10 us: a batch never fills the queue of launches
BATCH = 100
BATCHES = 30


def run_host() -> list[Row]:
    """Host microseconds per call, ours and PyTorch's in turn, each in batches of 100.

    "same pointers" repeats one call; "new pointers" gives A, its scales and D addresses that were
    never used before, as an allocator may. PyTorch's calls allocate their output, ours are given
    one. Their times stand in rows of their own and in each row's columns.
    """
    inputs = Inputs(CASE, Weight(CASE.n, CASE.k, "cuda"))
    moved = {
        "fp8_gemm_nt, new pointers": _moved_calls(
            (*inputs.rows, inputs.d),
            lambda a, sfa, d: partial(deep_gemm.fp8_gemm_nt, (a, sfa), inputs.weight.blocks, d),
        )
    }
    grouped, moved["m_grouped_fp8_gemm_nt_masked, new pointers"] = _grouped_calls()
    block = inputs.scaled_mm_block()
    calls: dict[str, Call | None] = {
        "fp8_gemm_nt, same pointers": inputs.ours,
        "fp8_gemm_nt, new pointers": None,
        "m_grouped_fp8_gemm_nt_masked, same pointers": grouped,
        "m_grouped_fp8_gemm_nt_masked, new pointers": None,
        "torch._scaled_mm": inputs.scaled_mm_tensor,
        "torch.nn.functional.scaled_mm": block,
        "torch.matmul": lambda: inputs.bf16 @ inputs.weight.bf16.T,
    }
    if block is None:
        del calls["torch.nn.functional.scaled_mm"]
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(BATCHES + 1):
        for name, call in calls.items():
            fresh = moved.get(name, iter(()))
            batch = list(itertools.islice(fresh, BATCH)) if call is None else [call] * BATCH
            samples[name].append(_microseconds_per_call(batch))
    figures = {name: Figures.of(times[1:]) for name, times in samples.items()}  # first: warm-up
    tensor_us = figures["torch._scaled_mm"].us
    block_us = figures["torch.nn.functional.scaled_mm"].us if block is not None else None
    return [
        make_row(
            name,
            each,
            m=CASE.m,
            n=CASE.n,
            k=CASE.k,
            cublaslt_tensor_us=tensor_us,
            cublaslt_block_us=block_us,
            ratio_to_tensor=each.us / tensor_us,
        )
        for name, each in figures.items()
    ]


def _grouped_calls() -> tuple[Call, Iterator[Call]]:
    """A masked call of eight small groups, and the like with other addresses each."""
    groups, m, n, k = 8, 64, 576, 1024
    rows, weight = (torch.randn(groups, size, k, device="cuda") for size in (m, n))
    a, sfa = (torch.stack(each) for each in zip(*map(_rowwise, rows), strict=True))
    b, sfb = (torch.stack(each) for each in zip(*map(_blockwise, weight), strict=True))
    sfa = deep_gemm.get_mn_major_tma_aligned_tensor(sfa)
    d = torch.empty(groups, m, n, dtype=torch.bfloat16, device="cuda")
    masked_m = torch.full((groups,), 8, dtype=torch.int32, device="cuda")

    def make_call(a: torch.Tensor, sfa: torch.Tensor, d: torch.Tensor) -> Call:
        call = deep_gemm.m_grouped_fp8_gemm_nt_masked
        return partial(call, (a, sfa), (b, sfb), d, masked_m, 8)

    return make_call(a, sfa, d), _moved_calls((a, sfa, d), make_call)


def _rowwise(x: torch.Tensor) -> Pair:
    return deep_gemm.per_token_cast_to_fp8(x)


def _blockwise(x: torch.Tensor) -> Pair:
    return deep_gemm.per_block_cast_to_fp8(x)


def _moved_calls(
    tensors: tuple[torch.Tensor, ...], make_call: Callable[..., Call]
) -> Iterator[Call]:
    """Calls of which each has A, its scales and D 128 bytes further on, in buffers of their own."""
    count = BATCH * (BATCHES + 1)
    buffers = [
        torch.zeros(
            tensor.untyped_storage().nbytes() + 128 * count, dtype=torch.uint8, device="cuda"
        ).view(tensor.dtype)
        for tensor in tensors
    ]
    for index in range(count):
        a, sfa, d = (
            buffer.as_strided(tensor.shape, tensor.stride(), index * 128 // tensor.itemsize)
            for buffer, tensor in zip(buffers, tensors, strict=True)
        )
        yield make_call(a, sfa, d)


def _microseconds_per_call(batch: Sequence[Call]) -> float:
    torch.cuda.synchronize()
    gc.disable()
    began = time.perf_counter()
    for call in batch:
        call()
    ended = time.perf_counter()
    gc.enable()
    return (ended - began) * 1e6 / len(batch)
