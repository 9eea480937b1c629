"""The dense kernel against the oracle: every config, edge, layout and kind of data, to the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from dense_tools import (
    CONFIGS,
    FP8,
    GuardedOutput,
    Operands,
    blocks,
    check,
    config_id,
    limits,
    make_operands,
    native_with_nan,
    with_config,
)
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import reference
from deep_gemm.testing import assert_bitwise_equal, compare
from deep_gemm.types import KernelConfig

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled")]

# m around every tile, wave, slab and 16-byte boundary
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193]
ROWS += [255, 256, 257, 300, 383, 385, 511, 513, 1000]
N_AND_K = [
    (8, 16), (24, 48), (96, 112), (128, 128), (136, 144), (520, 1040), (576, 7168), (1000, 128),
    (264, 2064), (2112, 1536),
]  # fmt: skip
FILLS = ["normal", "exponents", "zeros", "outliers", "tiny", "integers"]

# What every config has to get right.
SIZES = [
    (1, 8, 16),  # less than one of everything
    (3, 24, 7168),
    (65, 200, 272),  # one row in a second wave; tails of all three
    (97, 136, 1040),  # half of a tile of 192 plus one: the second CTA of a cluster has one row
    (193, 392, 128),  # clusters that hang over both edges; one k-block: shorter than any pipeline
    (257, 328, 512),
    (520, 1000, 384),  # an odd number of tiles per cluster
    (1100, 1304, 400),  # several waves of small tiles, several tiles per CTA
]


@pytest.fixture(params=CONFIGS, ids=config_id)
def config(request: pytest.FixtureRequest) -> KernelConfig:
    return request.param


@pytest.fixture
def memory() -> Iterator[None]:
    """For tests that fill the GPU: what they leave behind is given back."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def run(operands: Operands) -> torch.Tensor:
    m, n, _ = operands.sizes
    d = torch.full((m, n), math.nan, dtype=torch.bfloat16, device=operands.a[0].device)
    deep_gemm.fp8_gemm_nt(*operands, d)
    return d


@pytest.mark.parametrize("m", ROWS)
def test_every_edge(m: int) -> None:
    for seed, (n, k) in enumerate(N_AND_K):
        check(make_operands(m, n, k, seed=seed))


@pytest.mark.parametrize("fill", FILLS)
def test_every_kind_of_data(fill: str) -> None:
    for m, n, k in ((1, 576, 7168), (37, 264, 1040), (300, 520, 400), (1024, 2112, 7168)):
        check(make_operands(m, n, k, fill))


@pytest.mark.parametrize("m, n, k", [(4096, 2112, 7168), (4096, 7168, 2048), (8192, 4096, 1024)])
def test_large(m: int, n: int, k: int) -> None:
    check(make_operands(m, n, k))


def test_every_config_is_right_and_gives_the_same_bits(config: KernelConfig) -> None:
    for m, n, k in SIZES:
        for fill in ("normal", "exponents"):
            operands = make_operands(m, n, k, fill)
            d = check(operands, with_config(config))
            assert_bitwise_equal(d, run(operands), f"{config} against the plan, {(m, n, k)}")


def test_every_config_is_exact_where_no_sum_is_rounded(config: KernelConfig) -> None:
    """Small integers and scales that are powers of two leave rounding to bfloat16 only."""
    for m, n, k in ((65, 200, 272), (300, 520, 1040), (1, 1000, 7168)):
        operands = make_operands(m, n, k, "integers")
        d = check(operands, with_config(config))
        assert_bitwise_equal(d, operands.oracle().to(torch.bfloat16), f"{config}, {(m, n, k)}")


@pytest.mark.parametrize("num_sms", [1, 2, 7, 66])
def test_few_sms(num_sms: int) -> None:
    """One CTA has many tiles, the next clusters too; results do not depend on it."""
    for m, n, k in ((300, 520, 1040), (1000, 2112, 384), (3, 7168, 256)):
        operands = make_operands(m, n, k)
        expected = run(operands)
        deep_gemm.set_num_sms(num_sms)
        assert_bitwise_equal(check(operands), expected, f"num_sms={num_sms}")
        deep_gemm.set_num_sms(0)


@pytest.mark.parametrize("num_sms", [2, 7])
def test_every_config_with_many_tiles_per_cta(config: KernelConfig, num_sms: int) -> None:
    operands = make_operands(700, 1304, 400)
    expected = run(operands)
    deep_gemm.set_num_sms(num_sms)
    assert_bitwise_equal(check(operands, with_config(config)), expected)


@hypothesis_settings(max_examples=60, derandomize=True, deadline=None)
@given(
    m=st.integers(1, 700),
    n=st.integers(1, 150).map(lambda x: 8 * x),
    k=st.integers(1, 160).map(lambda x: 16 * x),
    fill=st.sampled_from(FILLS),
    config=st.sampled_from([None, *CONFIGS]),
)
def test_any_shape(m: int, n: int, k: int, fill: str, config: KernelConfig | None) -> None:
    check(make_operands(m, n, k, fill), with_config(config) if config else deep_gemm.fp8_gemm_nt)


@pytest.mark.parametrize("m, n, k", [(1, 2112, 7168), (200, 520, 1040), (1500, 4096, 2048)])
def test_a_hundred_runs_give_the_same_bits(m: int, n: int, k: int) -> None:
    operands = make_operands(m, n, k)
    expected = check(operands)
    outputs = torch.full((100, m, n), math.nan, dtype=torch.bfloat16, device="cuda")
    for d in outputs:
        deep_gemm.fp8_gemm_nt(*operands, d)
    bits = outputs.view(torch.int16)
    assert bool((bits == expected.view(torch.int16)).all())


def test_a_row_has_the_same_bits_whatever_m_is() -> None:
    operands = make_operands(4096, 2112, 1040)
    expected = run(operands)
    (a, sfa), b = operands
    for first, m in ((0, 1), (1, 7), (64, 100), (1000, 640), (96, 2000)):
        rows = slice(first, first + m)
        part = Operands((a[rows], native_with_nan(sfa[rows])), b)
        assert_bitwise_equal(run(part), expected[rows], f"rows {first} to {first + m}")


# NaN and infinity


def test_nan_stays_in_its_row_and_column() -> None:
    operands = make_operands(300, 520, 1040)
    expected = run(operands)
    (a, sfa), (b, _) = operands
    a[3, 1039:].view(torch.uint8).fill_(0x7F)
    sfa[130, 7] = math.nan
    sfa[299, :] = math.inf  # times sums of either sign: infinities, then NaN
    b[200, 0].view(torch.uint8).fill_(0xFF)
    d = run(operands)
    assert d[[3, 130]].isnan().all() and d[:, 200].isnan().all()
    assert not d[299].isfinite().any()
    rows = [row for row in range(300) if row not in (3, 130, 299)]
    columns = [column for column in range(520) if column != 200]
    assert_bitwise_equal(d[rows][:, columns], expected[rows][:, columns])


def test_overflow_is_infinite_at_the_right_places() -> None:
    operands = make_operands(70, 136, 256)
    (a, sfa), (b, _) = operands
    a[5], b[:] = torch.ones_like(a[5].float()).to(FP8), torch.ones_like(b.float()).to(FP8)
    sfa[5] = 3e38
    a[6], sfa[6] = (-torch.ones_like(a[6].float())).to(FP8), 3e38
    operands.b[1].fill_(1.0)
    d = check(operands)
    assert bool((d[5] == math.inf).all()) and bool((d[6] == -math.inf).all())


# Layouts


def test_row_major_scales_of_a_are_transposed_first() -> None:
    for m, n, k in ((1, 136, 1040), (130, 264, 1040), (1000, 512, 128)):
        (a, sfa), b = operands = make_operands(m, n, k)
        for other in (sfa.contiguous(), torch.nn.functional.pad(sfa, (1, 3))[:, 1:-3]):
            assert_bitwise_equal(check(Operands((a, other), b)), run(operands), f"{(m, n, k)}")


def test_scales_of_b_may_be_the_transpose_of_contiguous_ones() -> None:
    for n, k in ((520, 1040), (2112, 128), (96, 7168)):
        a, (b, sfb) = operands = make_operands(65, n, k)
        transposed = sfb.t().contiguous().t()
        assert_bitwise_equal(check(Operands(a, (b, transposed))), run(operands), f"{(n, k)}")


@pytest.mark.parametrize("form", ["nn", "tn", "tt"])
def test_the_transposed_forms_are_the_same_call(form: str) -> None:
    a, b = operands = make_operands(130, 264, 400)
    expected = check(operands)
    if form[0] == "t":
        a = a[0].t(), a[1].t()
    if form[1] == "n":
        b = b[0].t(), b[1].t()
    output = GuardedOutput(130, 264)
    getattr(deep_gemm, f"fp8_gemm_{form}")(a, b, output.d)
    output.check_guard()
    assert_bitwise_equal(output.d, expected)


def test_empty_problems() -> None:
    for m, n in ((0, 64), (64, 0), (0, 0)):
        a = torch.empty(m, 128, device="cuda").to(FP8), torch.empty(m, 1, device="cuda")
        b = torch.empty(n, 128, device="cuda").to(FP8), torch.empty(blocks(n), 1, device="cuda")
        deep_gemm.fp8_gemm_nt(a, b, torch.empty(m, n, dtype=torch.bfloat16, device="cuda"))
    output = GuardedOutput(70, 136)
    a = torch.empty(70, 0, device="cuda").to(FP8), torch.empty(70, 0, device="cuda")
    b = torch.empty(136, 0, device="cuda").to(FP8), torch.empty(2, 0, device="cuda")
    deep_gemm.fp8_gemm_nt(a, b, output.d)
    output.check_guard()
    assert not output.d.view(torch.int16).any()


# Programmatic dependent launch


@pytest.mark.parametrize("size", [32, 128])
def test_dependent_launches_see_what_they_depend_on(size: int) -> None:
    """Ten GEMMs in a row, each with the last one's D for its scales of A, in two buffers by turns.

    Pairs of bfloat16 read as float32 are nearly the odd ones of them, so D [s, 2 * s] is a native
    [s, s] of scales. A kernel that read too early, or wrote too early, would find other numbers.
    """
    operands = make_operands(size, 2 * size, 128 * size)
    a, (b, sfb) = operands.a[0], operands.b
    a[:], b[:] = (matrix.float().div(96).to(FP8) for matrix in (a, b))  # of size 1
    sfb.fill_(1 / math.sqrt(128 * size))

    def chain(pdl: bool) -> torch.Tensor:
        deep_gemm.set_pdl(pdl)
        buffers = torch.ones(2, size, 2 * size, device="cuda", dtype=torch.bfloat16)
        for step in range(10):
            sfa = buffers[step % 2].view(torch.float32).t()
            deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), buffers[1 - step % 2])
        return buffers

    expected = chain(pdl=False)
    assert expected.isfinite().all() and expected.float().abs().mean() > 1e-3
    for _ in range(5):
        assert_bitwise_equal(chain(pdl=True), expected)


# Beyond 2**31


@pytest.mark.usefixtures("memory")
def test_an_output_of_more_than_2_to_the_31_elements() -> None:
    m, n, k = 73728, 36864, 128
    operands = make_operands(m, n, k)
    (a, sfa), b = operands
    d = run(operands)
    for first in (0, 2**31 // n - 100, m - 200):
        rows = slice(first, first + 200)
        expected = reference.gemm_nt_f64(a[rows], sfa[rows], *b)
        compare(d[rows], expected, **limits(200, n), name=f"rows from {first}")
    assert not any(bool(part.isnan().any()) for part in d.split(4096))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("large", ["a", "b"])
def test_an_operand_of_more_than_2_to_the_31_elements(large: str) -> None:
    rows, k = 300_000, 7168
    codes = torch.randint(0, 0xFE, (rows, k), dtype=torch.uint8, device="cuda")
    data = codes.add_(codes >= 0x7F).view(FP8)  # every code but those of NaN
    m, n = (rows, 64) if large == "a" else (64, rows)
    other = make_operands(64, 64, k)
    scales = torch.rand(rows if large == "a" else blocks(rows), blocks(k), device="cuda")
    if large == "a":
        operands = Operands((data, native_with_nan(scales)), other.b)
    else:
        operands = Operands(other.a, (data, scales))
    d = run(operands)
    (a, sfa), (b, sfb) = operands
    for first in (0, 2**31 // k // 128 * 128, rows // 128 * 128 - 128):
        part = slice(first, first + 128)
        if large == "a":
            expected = reference.gemm_nt_f64(a[part], sfa[part], b, sfb)
            compare(d[part], expected, **limits(128, n))
        else:
            scale = sfb[first // 128 : first // 128 + 1]
            compare(d[:, part], reference.gemm_nt_f64(a, sfa, b[part], scale), **limits(m, 128))
    assert not d.isnan().any()


@pytest.mark.usefixtures("memory")
def test_rows_that_are_2_to_the_30_elements_apart() -> None:
    m, n, k, stride = 4, 136, 272, 2**30
    operands = make_operands(m, n, k)
    expected = check(operands)
    far_a = torch.empty(3 * stride + k, dtype=torch.uint8, device="cuda").view(FP8)
    far_a = far_a.as_strided((m, k), (stride, 1))
    far_a.copy_(operands.a[0])
    far_d = torch.empty(3 * stride + n, dtype=torch.bfloat16, device="cuda")
    far_d = far_d.as_strided((m, n), (stride, 1))
    far_d.fill_(math.nan)
    deep_gemm.fp8_gemm_nt((far_a, operands.a[1]), operands.b, far_d)
    assert_bitwise_equal(far_d, expected)
