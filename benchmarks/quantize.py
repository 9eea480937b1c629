"""Bandwidth of the quantisers next to that of a plain copy in the same run."""

from __future__ import annotations

from functools import partial

import torch

import deep_gemm
from benchmarks.dense import TimerLike
from benchmarks.results import Row, make_row
from benchmarks.timing import Call

SHAPES = ((4096, 7168), (8192, 7168), (16384, 7168), (36864, 7168), (7168, 16384))


def run_quantize(timer: TimerLike) -> list[Row]:
    """GB/s, read and written, of each quantiser on bf16 [m, k], and of a copy of that tensor."""
    rows = []
    for m, k in SHAPES:
        x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
        copy = torch.empty_like(x)
        scales = {
            "per_token_cast_to_fp8": m * -(-k // 128),
            "per_block_cast_to_fp8": -(-m // 128) * -(-k // 128),
            "per_channel_cast_to_fp8": -(-m // 128) * k,
        }
        num_bytes = {"copy": 4 * m * k}
        num_bytes |= {name: 3 * m * k + 4 * count for name, count in scales.items()}
        calls: list[Call] = [partial(copy.copy_, x)]
        calls += [partial(getattr(deep_gemm, name), x, use_ue8m0=False) for name in scales]
        for call in calls:
            call()
        with timer.session() as session:
            measurement = session.measure(calls)
        for (name, size), figures in zip(num_bytes.items(), measurement.figures, strict=True):
            rows.append(
                make_row(
                    name,
                    figures,
                    m=m,
                    k=k,
                    gb_per_s=size / figures.us / 1e3,
                    sm_mhz=measurement.sm_mhz,
                    power_w=measurement.power_w,
                )
            )
    return rows
