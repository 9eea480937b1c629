"""Host time per call: what the CPU spends, and so the least time between two small kernels."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

import deep_gemm
from benchmarks.baselines import Inputs, Weight
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
    moved = _moved_calls(inputs)
    block = inputs.scaled_mm_block()
    calls: dict[str, Call | None] = {
        "fp8_gemm_nt, same pointers": inputs.ours,
        "fp8_gemm_nt, new pointers": None,
        "torch._scaled_mm": inputs.scaled_mm_tensor,
        "torch.nn.functional.scaled_mm": block,
        "torch.matmul": lambda: inputs.bf16 @ inputs.weight.bf16.T,
    }
    if block is None:
        del calls["torch.nn.functional.scaled_mm"]
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(BATCHES + 1):
        for name, call in calls.items():
            batch = [next(moved) for _ in range(BATCH)] if call is None else [call] * BATCH
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


def _moved_calls(inputs: Inputs) -> Iterator[Call]:
    """Calls of which each has A, its scales and D 128 bytes further on, in buffers of their own."""
    tensors = *inputs.rows, inputs.d
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
        yield partial(deep_gemm.fp8_gemm_nt, (a, sfa), inputs.weight.blocks, d)


def _microseconds_per_call(batch: Sequence[Call]) -> float:
    torch.cuda.synchronize()
    gc.disable()
    began = time.perf_counter()
    for call in batch:
        call()
    ended = time.perf_counter()
    gc.enable()
    return (ended - began) * 1e6 / len(batch)
