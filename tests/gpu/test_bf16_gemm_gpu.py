"""BF16 through torch's matmul on the GPU: results, no synchronisation, graphs, streams, devices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from grouped_tools import random_values
from test_bf16_gemm import (
    BF16,
    CONTIGUOUS,
    F32,
    FP8,
    LAYOUTS,
    STRIDES,
    nan,
    rand,
    run_contiguous,
    run_dense,
    run_k_grouped,
    run_masked,
)

from deep_gemm import bf16_gemm, bf16_matmul
from deep_gemm.config import settings
from deep_gemm.testing import assert_bitwise_equal, compare

pytestmark = pytest.mark.gpu

SIZES = [(1, 1, 1), (1, 8, 16), (3, 5, 7), (65, 136, 304), (130, 96, 1000), (257, 512, 2048)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operand", [BF16, FP8])
def test_dense(operand: torch.dtype, layout: str, dtype: torch.dtype) -> None:
    for prefix in ("cublaslt", "bf16") if operand == BF16 else ("cublaslt",):
        function = getattr(bf16_gemm, f"{prefix}_gemm_{layout}")
        for sizes in SIZES:
            for strides in STRIDES:
                for c in ("none", "d", "other"):
                    options: dict[str, Any] = {"operand": operand, "dtype": dtype, "c": c}
                    run_dense(function, layout, sizes, strides=strides, device="cuda", **options)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_fp8_by_scaled_mm(dtype: torch.dtype) -> None:
    """Its sums have about 14 bits, float32 D or not."""
    for m, n, k in ((1, 16, 16), (17, 48, 256), (300, 512, 1024)):
        a, b = rand(m, k, device="cuda", dtype=FP8), rand(n, k, device="cuda", dtype=FP8)
        d = nan(m, n, dtype=dtype, device="cuda")
        assert bf16_matmul._fits_scaled_mm(d, a, b.t())
        with no_synchronisation():
            bf16_gemm.cublaslt_gemm_nt(a, b, d)
        compare(d, a.double() @ b.double().t(), tol=4e-5)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("kind, alignment", CONTIGUOUS)
def test_contiguous(kind: str, alignment: int, layout: str, zero: bool) -> None:
    rng = random.Random(0)
    cases = [(1, 1, 40, 48), (4, 129, 264, 512), (9, 1000, 40, 48), (40, 2000, 264, 512)]
    cases += [(4, 129, 12, 20), (1100, 600, 8, 16)]  # not for _grouped_mm
    for groups, rows, n, k in cases:
        for dtype in (BF16, F32):
            values = random_values(kind, rng, groups, rows, alignment)
            options: dict[str, Any] = {"layout": layout, "zero": zero, "dtype": dtype}
            options |= {"n": n, "k": k, "device": "cuda"}
            run_contiguous(kind, alignment, values, rows, groups, **options)


@pytest.mark.parametrize("strides", STRIDES)
def test_contiguous_strides(strides: str) -> None:
    for layout in ("nt", "nn"):
        options: dict[str, Any] = {"layout": layout, "strides": strides, "device": "cuda"}
        run_contiguous("ids", 16, [1] * 20 + [-1] * 12 + [0] * 9, 41, 2, **options)


def test_contiguous_corner_cases() -> None:
    for kind in ("ids", "psum"):
        nobody = [-1] * 50 if kind == "ids" else [0] * 3
        one = [2] * 50 if kind == "ids" else [0, 0, 50]
        for values in (nobody, one):
            for n, k in ((40, 48), (40, 0), (0, 48), (3, 5), (8, 8)):
                for dtype in (BF16, F32):
                    options: dict[str, Any] = {"n": n, "k": k, "dtype": dtype, "device": "cuda"}
                    run_contiguous(kind, 16, values, 50, 3, **options)
    run_contiguous("ids", 16, [], 0, 3, device="cuda")


def test_grouped_mm_is_used_where_it_can_be() -> None:
    d = nan(64, 40, device="cuda")
    b = rand(3, 40, 48, device="cuda")
    assert bf16_matmul._fits_grouped_mm(d, b.transpose(1, 2)) == (
        hasattr(torch, "_grouped_mm") and bf16_matmul._HAS_OUT_DTYPE
    )
    assert not bf16_matmul._fits_grouped_mm(d.float(), b.transpose(1, 2))
    assert not bf16_matmul._fits_grouped_mm(d, b[:, :, :44].transpose(1, 2))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("strides", STRIDES)
def test_masked(strides: str, dtype: torch.dtype) -> None:
    for masked_m, rows in (([0], 1), ([3, 0, 20], 20), ([0] * 5, 130), ([7] * 64, 7)):
        run_masked(masked_m, rows, dtype=dtype, strides=strides, device="cuda")
    run_masked([3, 0], 4, k=0, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("c", ["none", "d", "other"])
def test_k_grouped(c: str, dtype: torch.dtype) -> None:
    for ks in ([128], [128, 0, 256], [0, 0], [1, 130, 7, 0]):
        run_k_grouped(ks, dtype=dtype, c=c, device="cuda")


def test_wild_layouts_write_nothing_outside() -> None:
    settings.mk_alignment = 16
    a, b = rand(70, 48, device="cuda"), rand(3, 40, 48, device="cuda")
    for dtype in (BF16, F32):
        for values in ([5, -3, 2**31 - 1], [2**31 - 1] * 3, [-(2**31)] * 3, [60, 20, 70]):
            buffer = nan(72, 40, dtype=dtype, device="cuda")
            bf16_gemm.m_grouped_bf16_gemm_nt_contiguous(
                a, b, buffer[1:-1], int32(values), use_psum_layout=True
            )
            assert buffer[0].isnan().all() and buffer[-1].isnan().all()
        buffer = nan(72, 40, dtype=dtype, device="cuda")
        ids = [2**31 - 1, -(2**31), 3, 1] * 17 + [0, 9]
        bf16_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, buffer[1:-1], int32(ids))
        assert buffer[0].isnan().all() and buffer[-1].isnan().all()
        compare(buffer[4], a[3].double() @ b[1].double().t(), tol=4e-5)


Call = Callable[[], None]


def grouped_calls(
    dtype: torch.dtype,
) -> Iterator[tuple[str, Call, torch.Tensor, torch.Tensor, list[list[int]]]]:
    """(name, call, its d, its layout, two contents of the layout)."""
    settings.mk_alignment = 16
    a, b = rand(96, 64, device="cuda"), rand(3, 40, 64, device="cuda")
    d, ids, ends = nan(96, 40, dtype=dtype, device="cuda"), int32([0] * 96), int32([0] * 3)
    f = bf16_gemm.m_grouped_bf16_gemm_nt_contiguous
    yield "ids", lambda: f(a, b, d, ids), d, ids, [[0] * 50 + [-1] * 14 + [2] * 32, [1] * 96]
    yield (
        "psum",
        lambda: f(a, b, d, ends, use_psum_layout=True),
        d,
        ends,
        [[20, 50, 90], [0, 96, 96]],
    )
    a3 = rand(3, 20, 64, device="cuda")
    d3, counts = nan(3, 20, 40, dtype=dtype, device="cuda"), int32([0] * 3)
    masked = bf16_gemm.m_grouped_bf16_gemm_nt_masked
    yield "masked", lambda: masked(a3, b, d3, counts, 9), d3, counts, [[20, 0, 3], [0, 0, 1]]


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_grouped_calls_do_not_synchronise_and_replay_in_graphs(dtype: torch.dtype) -> None:
    for name, call, d, layout, contents in grouped_calls(dtype):
        expected = []
        for values in contents:
            layout.copy_(int32(values))
            d.fill_(float("nan"))
            with no_synchronisation():
                call()
            expected.append(d.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        for values, result in zip(contents, expected, strict=True):
            layout.copy_(int32(values))
            d.fill_(float("nan"))
            graph.replay()
            assert_bitwise_equal(d, result, f"{name} {values}")


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_dense_and_k_grouped_calls_replay_in_graphs(dtype: torch.dtype) -> None:
    a, b = rand(64, 96, device="cuda"), rand(40, 96, device="cuda")
    d = nan(64, 40, dtype=dtype, device="cuda")
    x, y = rand(96, 24, device="cuda"), rand(96, 40, device="cuda")
    wide, sizes = nan(2, 24, 40, dtype=dtype, device="cuda"), int32([32, 64])
    fp8 = rand(64, 96, device="cuda").to(FP8), rand(48, 96, device="cuda").to(FP8)
    d_fp8 = nan(64, 48, dtype=dtype, device="cuda")

    def call() -> None:
        bf16_gemm.bf16_gemm_nt(a, b, d)
        bf16_gemm.k_grouped_bf16_gemm_tn_contiguous(x, y, wide, [32, 64], sizes)
        bf16_gemm.cublaslt_gemm_nt(*fp8, d_fp8)

    with no_synchronisation():
        call()
    expected = [each.clone() for each in (d, wide, d_fp8)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for each in (d, wide, d_fp8):
        each.fill_(float("nan"))
    graph.replay()
    for each, result in zip((d, wide, d_fp8), expected, strict=True):
        assert_bitwise_equal(each, result)


def test_values_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.mk_alignment = 16
    a, b, d = (
        rand(32, 64, device="cuda"),
        rand(2, 40, 64, device="cuda"),
        nan(32, 40, device="cuda"),
    )
    ids = int32([0, 1] * 16)
    bf16_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, ids)
    monkeypatch.setenv("DG_DEBUG_CHECKS", "1")
    with pytest.raises(ValueError, match=r"grouped_layout\[1\] is 1"):
        bf16_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # no check, no error
        bf16_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, ids)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_without_what_torch_2_8_added(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_matmul, "_HAS_OUT_DTYPE", False)
    run_dense(bf16_gemm.bf16_gemm_nt, "nt", (65, 136, 304), dtype=dtype, c="d", device="cuda")
    run_contiguous("ids", 16, [1] * 32 + [0] * 9, 41, 2, dtype=dtype, device="cuda")
    run_masked([3, 0, 20], 20, dtype=dtype, device="cuda")
    run_k_grouped([128, 0, 256], dtype=dtype, c="other", device="cuda")
