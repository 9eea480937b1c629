"""BF16 through torch's matmul: dense, cuBLASLt's names, grouped; the GPU tests use the helpers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grouped_tools import (
    UNTOUCHED,
    ZERO,
    ids_states,
    masked_states,
    psum_states,
    random_values,
)

import deep_gemm
from deep_gemm import bf16_gemm, bf16_matmul
from deep_gemm.config import settings
from deep_gemm.testing import assert_bitwise_equal, compare

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
LAYOUTS = ["nt", "nn", "tn", "tt"]
SIZES = [(1, 1, 1), (1, 8, 16), (3, 5, 7), (65, 136, 300), (130, 96, 1000)]
STRIDES = ["packed", "transposed", "padded", "sparse"]
CONTIGUOUS = [("ids", 16), ("ids", 128), ("psum", 1), ("psum", 8), ("psum", 128)]


def rand(*shape: int, device: str = "cpu", dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def nan(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def strided(x: torch.Tensor, strides: str) -> torch.Tensor:
    """The same values with other strides, and NaN between."""
    if strides == "packed":
        return x.contiguous()
    if strides == "transposed":
        return x.mT.contiguous().mT
    *rest, rows, columns = x.shape
    wide = torch.full((*rest, rows + 1, 2 * columns + 16), math.nan, device=x.device).to(x.dtype)
    view = wide[..., :rows, :columns] if strides == "padded" else wide[..., :rows, 3 : 3 + columns]
    return view.copy_(x)


def close(d: torch.Tensor, ref: torch.Tensor, name: str, tol: float | None = None) -> None:
    """float32 has to be that of float32 sums, not of bfloat16 (1e-6); CUDA may split bfloat16's."""
    compare(d, ref, tol=tol or (1e-10 if d.dtype == F32 else 4e-5), name=name)


def run_dense(
    function: Callable[..., None],
    layout: str,
    sizes: tuple[int, int, int],
    *,
    operand: torch.dtype = BF16,
    dtype: torch.dtype = BF16,
    c: str = "none",
    strides: str = "packed",
    device: str = "cpu",
    tol: float | None = None,
) -> torch.Tensor:
    """Call, hold D against float64, and see that nothing beside it changed; returns D."""
    m, n, k = sizes
    a, b = rand(m, k, device=device, dtype=operand), rand(k, n, device=device, dtype=operand)
    buffer = nan(m + 2, n + 8, dtype=dtype, device=device)
    d = buffer[1 : 1 + m, :n]
    expected = a.double() @ b.double()
    other = None
    if c != "none":
        initial = rand(m, n, device=device, dtype=dtype)
        expected += initial.double()
        other = d.copy_(initial) if c == "d" else strided(initial, strides)
    a = strided(a if layout[0] == "n" else a.t(), strides)
    b = strided(b if layout[1] == "n" else b.t(), strides)
    function(a, b, d, other)
    close(d, expected, f"{function.__name__} {sizes} {operand} -> {dtype}, c={c}, {strides}", tol)
    assert buffer[0].isnan().all() and buffer[-1].isnan().all() and buffer[:, n:].isnan().all()
    return d


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# Dense


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prefix", ["bf16", "cublaslt"])
def test_dense(prefix: str, layout: str, dtype: torch.dtype) -> None:
    function = getattr(bf16_gemm, f"{prefix}_gemm_{layout}")
    for sizes in SIZES:
        for strides in STRIDES:
            for c in ("none", "d", "other"):
                run_dense(function, layout, sizes, dtype=dtype, c=c, strides=strides)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_without_scales(layout: str, dtype: torch.dtype) -> None:
    function = getattr(bf16_gemm, f"cublaslt_gemm_{layout}")
    for sizes in SIZES:
        for strides in STRIDES:
            for c in ("none", "d", "other"):
                options: dict[str, Any] = {"dtype": dtype, "c": c, "strides": strides}
                run_dense(function, layout, sizes, operand=FP8, **options)


def test_fp8_keeps_every_finite_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    d = torch.empty(len(codes), 1)
    bf16_gemm.cublaslt_gemm_nt(codes[:, None].view(FP8), torch.ones(1, 1).to(FP8), d)
    assert_bitwise_equal(d.flatten() + 0.0, codes.view(FP8).float() + 0.0)


def test_c_is_rounded_with_the_product_once() -> None:
    a, c, d = torch.ones(1, 2, dtype=BF16), torch.ones(1, 1, dtype=BF16), nan(1, 1)
    b = torch.tensor([[2.0**-8, 2.0**-18]], dtype=BF16)  # half a step of 1, and a little more
    bf16_gemm.bf16_gemm_nt(a, b, d, c)
    assert d.item() == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_empty_sizes(dtype: torch.dtype) -> None:
    for m, n, k in ((0, 8, 16), (8, 0, 16), (0, 0, 0)):
        bf16_gemm.bf16_gemm_nt(rand(m, k), rand(n, k), torch.empty(m, n, dtype=dtype))
    c, d = rand(8, 8, dtype=dtype), nan(8, 8, dtype=dtype)
    bf16_gemm.bf16_gemm_nt(rand(8, 0), rand(8, 0), d, c)
    assert_bitwise_equal(d, c)
    bf16_gemm.bf16_gemm_nt(rand(8, 0), rand(8, 0), d, d)
    assert_bitwise_equal(d, c)
    bf16_gemm.cublaslt_gemm_nn(rand(8, 0, dtype=FP8), rand(0, 8, dtype=FP8), d)
    assert (d == 0).all()


def test_parameters_and_autocast() -> None:
    a, b = torch.nn.Parameter(rand(8, 64)), torch.nn.Parameter(rand(16, 64))
    d = nan(8, 16, dtype=F32)
    with torch.autocast("cpu", dtype=BF16):
        bf16_gemm.bf16_gemm_nt(a, b, d)
    close(d, a.double() @ b.double().t(), "d")
    assert not d.requires_grad


# Grouped: host loops, and on the CPU what runs on a GPU


@pytest.fixture(params=["host", "blocks", "sorted"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "host":
        monkeypatch.setattr(bf16_matmul, "_on_host", lambda d: False)
        monkeypatch.setattr(bf16_matmul, "_MAX_GATHERED", 3 * 40 * 48)  # several bands
    if request.param == "sorted":
        if not hasattr(torch, "_grouped_mm"):
            pytest.skip("this torch has no _grouped_mm")
        monkeypatch.setattr(bf16_matmul, "_fits_grouped_mm", lambda d, b: d.dtype == BF16)
    return request.param


def run_contiguous(
    kind: str,
    alignment: int,
    values: list[int],
    rows: int,
    groups: int,
    *,
    n: int = 40,
    k: int = 48,
    layout: str = "nt",
    dtype: torch.dtype = BF16,
    strides: str = "packed",
    zero: bool = True,
    device: str = "cpu",
) -> torch.Tensor:
    """Call with NaN in every padding row, hold each row of D against its state; returns D."""
    settings.mk_alignment = alignment
    if kind == "ids":
        states = torch.tensor(ids_states(values, groups, alignment), dtype=torch.long)
    else:
        states = torch.tensor(psum_states(values, rows, alignment), dtype=torch.long)
    a, b = rand(rows, k), rand(groups, k, n)
    a[states < 0] = math.nan
    before = rand(rows, n, dtype=dtype)
    buffer = nan(rows + 2, n + 8, dtype=dtype, device=device)
    d = buffer[1 : 1 + rows, :n]
    d.copy_(before)
    function = getattr(bf16_gemm, f"m_grouped_bf16_gemm_{layout}_contiguous")
    function(
        strided(a.to(device), strides),
        strided((b if layout == "nn" else b.mT).to(device), strides),
        d,
        torch.tensor(values, dtype=torch.int32, device=device),
        use_psum_layout=kind == "psum",
        ensure_zero_padding=zero,
    )
    result = d.cpu()
    name = f"{function.__name__} {kind} {values}"
    expected = before.double()
    for group in range(groups):
        expected[states == group] = a[states == group].double() @ b[group].double()
    close(result[states >= 0], expected[states >= 0], name)
    untouched = (states == UNTOUCHED) | ((states == ZERO) & (not zero))
    assert_bitwise_equal(result[untouched], before[untouched], name)
    if zero:
        assert (result[states == ZERO] == 0).all(), name
    assert buffer[0].isnan().all() and buffer[-1].isnan().all() and buffer[:, n:].isnan().all()
    return d


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("kind, alignment", CONTIGUOUS)
def test_contiguous(kind: str, alignment: int, layout: str, zero: bool, path: str) -> None:
    rng = random.Random(0)
    for groups, rows in ((1, 1), (1, 300), (4, 129), (5, 640), (9, 1000), (40, 700)):
        for dtype in (BF16, F32):
            values = random_values(kind, rng, groups, rows, alignment)
            options: dict[str, Any] = {"layout": layout, "zero": zero, "dtype": dtype}
            run_contiguous(kind, alignment, values, rows, groups, **options)


@pytest.mark.parametrize("strides", STRIDES)
def test_contiguous_strides(strides: str, path: str) -> None:
    if path == "sorted" and strides == "sparse":
        pytest.skip("_grouped_mm takes strides of whole 16 bytes")
    for layout in ("nt", "nn"):
        options: dict[str, Any] = {"layout": layout, "strides": strides}
        run_contiguous("ids", 16, [1] * 20 + [-1] * 12 + [0] * 9, 41, 2, **options)


def test_contiguous_corner_cases(path: str) -> None:
    for kind in ("ids", "psum"):
        nobody = [-1] * 50 if kind == "ids" else [0] * 3
        run_contiguous(kind, 16, nobody, 50, 3)
        one = [2] * 50 if kind == "ids" else [0, 0, 50]
        run_contiguous(kind, 16, one, 50, 3)
        run_contiguous(kind, 1 << 20 if kind == "psum" else 1 << 16, one, 50, 3)
        few = [511] * 3 if kind == "ids" else [0] * 511 + [3]
        run_contiguous(kind, 16, few, 3, 512)
        run_contiguous(kind, 16, one, 50, 3, n=8, k=8)
        if path != "sorted":
            run_contiguous(kind, 16, one, 50, 3, k=0)
            run_contiguous(kind, 16, one, 50, 3, n=0)
            run_contiguous(kind, 16, one, 50, 3, n=3, k=5)
    run_contiguous("ids", 16, [], 0, 3)
    run_contiguous("psum", 16, [0, 0], 0, 2)


def test_wrong_values_do_no_harm_where_they_are_not_read(path: str) -> None:
    """As on CUDA: ids that do not exist count as -1, wild ends write nothing outside of D."""
    if path == "host":
        return
    groups, m, n, k = 3, 70, 40, 48
    a, b = rand(m, k), rand(groups, k, n)
    ids = torch.tensor([-7, 9, 1, 0] + [2] * 12 + [5] * 54, dtype=torch.int32)
    before = rand(m, n)
    d = before.clone()
    bf16_matmul.multiply_contiguous(d, a, b, ids, 16, False, True)
    assert (d[:2] == 0).all()
    close(d[2:16], a[2:16].double() @ b[1].double(), "first valid id")
    assert_bitwise_equal(d[16:], before[16:])
    for ends in ([5, -3, 2**31 - 1], [2**31 - 1] * 3, [-(2**31)] * 3, [60, 20, 70]):
        layout = torch.tensor(ends, dtype=torch.int32)
        buffer = nan(m + 2, n)
        bf16_matmul.multiply_contiguous(buffer[1:-1], a, b, layout, 16, True, True)
        assert buffer[0].isnan().all() and buffer[-1].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("strides", STRIDES)
def test_masked(strides: str, dtype: torch.dtype, path: str) -> None:
    rng = random.Random(0)
    for groups, rows in ((1, 1), (3, 20), (5, 130), (64, 7)):
        values = random_values("masked", rng, groups, rows, 128)
        for masked_m in (values, [0] * groups, [rows] * groups):
            run_masked(masked_m, rows, dtype=dtype, strides=strides)
    run_masked([3, 0], 4, k=0, dtype=dtype)
    run_masked([0, 0], 0, dtype=dtype)


def run_masked(
    masked_m: list[int],
    rows: int,
    *,
    n: int = 40,
    k: int = 48,
    dtype: torch.dtype = BF16,
    strides: str = "packed",
    device: str = "cpu",
) -> None:
    groups = len(masked_m)
    states = torch.tensor(masked_states(masked_m, rows), dtype=torch.long).view(groups, rows)
    a, b = rand(groups, rows, k), rand(groups, n, k)
    a[states < 0] = math.nan
    before = rand(groups, rows, n, dtype=dtype)
    d = before.to(device, copy=True)
    bf16_gemm.m_grouped_bf16_gemm_nt_masked(
        strided(a.to(device), strides),
        strided(b.to(device), strides),
        d,
        torch.tensor(masked_m, dtype=torch.int32, device=device),
        0,
    )
    expected = torch.where(states[..., None] < 0, before.double(), a.double() @ b.double().mT)
    close(d.cpu(), expected, f"masked_m={masked_m}")
    assert_bitwise_equal(d.cpu()[states < 0], before[states < 0])


def run_k_grouped(
    ks: list[int], *, dtype: torch.dtype = BF16, c: str = "none", device: str = "cpu"
) -> None:
    m, n = 24, 40
    a, b = rand(sum(ks), m, device=device), rand(sum(ks), n, device=device)
    initial = rand(len(ks), m, n, device=device, dtype=dtype)
    d = initial.clone() if c == "d" else nan(len(ks), m, n, dtype=dtype, device=device)
    other = {"none": None, "d": d, "other": initial}[c]
    layout = torch.tensor(ks, dtype=torch.int32, device=device)
    bf16_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, layout, other)
    expected = torch.zeros_like(initial, dtype=torch.float64) if c == "none" else initial.double()
    parts = zip(a.double().split(ks), b.double().split(ks), strict=True)
    close(d, expected + torch.stack([x.t() @ y for x, y in parts]), f"ks={ks}, c={c}")


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("c", ["none", "d", "other"])
def test_k_grouped(c: str, dtype: torch.dtype) -> None:
    for ks in ([128], [128, 0, 256], [0, 0], [1, 130, 7, 0]):
        run_k_grouped(ks, dtype=dtype, c=c)


def test_names() -> None:
    assert bf16_gemm.bf16_m_grouped_gemm_nt_masked is bf16_gemm.m_grouped_bf16_gemm_nt_masked
    a, b, d = rand(32, 16), rand(2, 8, 16), nan(32, 8)
    ids = torch.ones(32, dtype=torch.int32)
    deep_gemm.set_mk_alignment_for_contiguous_layout(16)
    bf16_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, m_indices=ids)
    close(d, a.double() @ b[1].double().t(), "d")


# Errors


def refuse(error: type[Exception], words: str, function: Callable[..., None], *args: Any) -> None:
    with pytest.raises(error) as caught:
        function(*args)
    assert type(caught.value) is error
    for word in words.split(" ... "):
        assert word in str(caught.value)


def test_dense_errors() -> None:
    f, a, b, d = bf16_gemm.bf16_gemm_nt, rand(8, 16), rand(24, 16), nan(8, 24)
    c = nan(8, 24)
    refuse(TypeError, "a is a list, expected a torch.Tensor", f, [a], b, d)
    refuse(TypeError, "d is a NoneType", f, a, b, None)
    refuse(TypeError, "b has dtype torch.float32, expected torch.bfloat16", f, a, b.float(), d)
    refuse(TypeError, "a has dtype torch.float8_e4m3fn", f, a.to(FP8), b.to(FP8), d)
    refuse(TypeError, "d has dtype torch.float16 ... torch.float32", f, a, b, d.half())
    refuse(ValueError, "a has 3 dimensions", f, a[None], b, d)
    refuse(ValueError, "b has shape (24, 8), expected (24, 16) = (n, k)", f, a, b[:, :8], d)
    refuse(ValueError, "d has shape (8, 8), expected (8, 24) = (m, n)", f, a, b, d[:, :8])
    refuse(ValueError, "d has strides (1, 8)", f, a, b, d.t().contiguous().t())
    refuse(ValueError, "d has strides (0, 1)", f, a, b, d[:1].expand(8, 24))
    refuse(ValueError, "b is on meta, expected cpu", f, a, b.to("meta"), d)
    square = rand(8, 8)
    refuse(ValueError, "d shares memory with a", f, square, rand(8, 8), square)
    refuse(ValueError, "d shares memory with b", f, rand(8, 8), square, square)
    refuse(TypeError, "c is a float", f, a, b, d, 1.0)
    refuse(TypeError, "c has dtype torch.float32, expected torch.bfloat16", f, a, b, d, c.float())
    refuse(ValueError, "c has shape (24,)", f, a, b, d, c[0])
    rows = nan(9, 24)
    refuse(ValueError, "c shares memory with d at another place", f, a, b, rows[:8], rows[1:])
    square = nan(8, 8)
    refuse(ValueError, "other strides", f, a, b[:8], square, square.t())
    refuse(ValueError, "compiled_dims is 'x'", f, a, b, d, None, "x")
    refuse(TypeError, "b has dtype", bf16_gemm.cublaslt_gemm_nt, a.to(FP8), b, d)
    for layout in LAYOUTS:  # what fits in no layout
        f = getattr(bf16_gemm, f"bf16_gemm_{layout}")
        refuse(ValueError, "b has shape (3, 4)", f, rand(8, 9), rand(3, 4), d)


def test_grouped_errors() -> None:
    f = bf16_gemm.m_grouped_bf16_gemm_nt_contiguous
    a, b, d = rand(256, 16), rand(2, 8, 16), nan(256, 8)
    ids = torch.zeros(256, dtype=torch.int32)
    refuse(TypeError, "missing", f, a, b, d)
    remedy = "dtype torch.int64, expected torch.int32; grouped_layout.int()"
    refuse(TypeError, remedy, f, a, b, d, ids.long())
    refuse(TypeError, "grouped_layout is a list", f, a, b, d, [0] * 256)
    refuse(ValueError, "grouped_layout has shape (255,), expected (256,)", f, a, b, d, ids[1:])
    refuse(
        ValueError, "grouped_layout has shape (256,), expected (2,)", f, a, b, d, ids, "nk", True
    )
    refuse(ValueError, "grouped_layout is on meta", f, a, b, d, ids.to("meta"))
    refuse(ValueError, "b has shape (2, 8, 8), expected (2, 8, 16)", f, a, b[..., :8], d, ids)
    refuse(ValueError, "b has 2 dimensions", f, a, b[0], d, ids)
    refuse(ValueError, "at least one", f, a, b[:0], d, ids)
    with pytest.raises(TypeError, match="given"):
        f(a, b, d, ids, m_indices=ids)
    for row, group in ((130, 2), (7, -2), (140, 1)):
        wrong = ids.clone()
        wrong[row] = group
        refuse(ValueError, f"grouped_layout[{row}] is {group}", f, a, b, d, wrong)
    for ends, group in (([3, 2], 1), ([-1, 2], 0), ([0, 257], 1)):
        layout = torch.tensor(ends, dtype=torch.int32)
        words = f"grouped_layout[{group}] is {ends[group]}"
        refuse(ValueError, words, f, a, b, d, layout, "nk", True)
    settings.mk_alignment = 8
    refuse(ValueError, "multiple of 16", f, a, b, d, ids)
    assert d.isnan().all()


def test_masked_and_k_grouped_errors() -> None:
    f = bf16_gemm.m_grouped_bf16_gemm_nt_masked
    a, b, d = rand(2, 4, 16), rand(2, 8, 16), nan(2, 4, 8)
    counts = torch.tensor([4, 0], dtype=torch.int32)
    refuse(TypeError, "masked_m has dtype torch.int64", f, a, b, d, counts.long(), 1)
    refuse(ValueError, "masked_m has shape (1,)", f, a, b, d, counts[:1], 1)
    refuse(ValueError, "masked_m[0] is 5", f, a, b, d, counts + 1, 1)
    refuse(ValueError, "masked_m[1] is -1", f, a, b, d, counts - 1, 1)
    refuse(ValueError, "b has shape (1, 8, 16), expected (2, 8, 16)", f, a, b[:1], d, counts, 1)
    refuse(ValueError, "d has strides", f, a, b, d[:1].expand(2, 4, 8), counts, 1)
    f = bf16_gemm.k_grouped_bf16_gemm_tn_contiguous
    a, b, ks, sizes = rand(12, 4), rand(12, 8), [4, 8], torch.tensor([4, 8], dtype=torch.int32)
    refuse(NotImplementedError, "use_psum_layout is True", f, a, b, d, ks, sizes, None, "mn", True)
    refuse(TypeError, "ks_cpu is a Tensor", f, a, b, d, sizes, sizes)
    refuse(TypeError, "ks_cpu is a NoneType", f, a, b, d, None, sizes)
    refuse(ValueError, "sum 8, expected ... sum 12", f, a, b, d, [4, 4], sizes)
    refuse(ValueError, "ks_cpu is [-4, 16]", f, a, b, d, [-4, 16], sizes)
    refuse(ValueError, "grouped_layout is [4, 8], expected ... [8, 4]", f, a, b, d, [8, 4], sizes)
    refuse(TypeError, "grouped_layout has dtype torch.int64", f, a, b, d, ks, sizes.long())
    refuse(ValueError, "b has shape (8, 8), expected (12, 8)", f, a, b[:8], d, ks, sizes)
    refuse(ValueError, "d has shape (2, 4, 7)", f, a, b, d[..., :7], ks, sizes)
    assert d.isnan().all()
