"""The reference backend against a float64 product, and what a row of D may depend on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm import reference
from deep_gemm.testing import assert_bitwise_equal, compare

FP8 = torch.float8_e4m3fn


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    blocks = -(-k // 128)
    a, b = torch.randn(m, k).to(FP8), torch.randn(n, k).to(FP8)
    sfa = torch.exp2(torch.rand(m, blocks) * 8 - 4)
    sfb = torch.exp2(torch.rand(-(-n // 128), blocks) * 8 - 4)
    return a, sfa, b, sfb, torch.full((m, n), float("nan"), dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@given(st.integers(1, 200), st.integers(1, 300), st.integers(1, 400))
def test_against_float64(m: int, n: int, k: int) -> None:
    a, sfa, b, sfb, d = operands(m, n, k)
    reference.gemm_nt(a, sfa, b, sfb, d)
    compare(d, reference.gemm_nt_f64(a, sfa, b, sfb))


def test_float64_is_the_formula() -> None:
    a, sfa, b, sfb, _ = operands(3, 130, 200)
    out = reference.gemm_nt_f64(a, sfa, b, sfb)
    for m, n in ((0, 0), (2, 127), (1, 128), (2, 129)):
        expected = 0.0
        for k in range(200):
            scale = float(sfa[m, k // 128]) * float(sfb[n // 128, k // 128])
            expected += scale * float(a[m, k]) * float(b[n, k])
        assert float(out[m, n]) == pytest.approx(expected, rel=1e-12)


def test_dequantise() -> None:
    a, sfa, b, sfb, _ = operands(3, 130, 200)
    assert reference.dequantize_a(a, sfa)[2, 128] == a[2, 128].double() * sfa[2, 1].double()
    assert reference.dequantize_b(b, sfb)[128, 127] == b[128, 127].double() * sfb[1, 0].double()
    assert reference.dequantize_a(a, sfa, torch.float32).dtype == torch.float32
    assert reference.dequantize_b(b, sfb, torch.float32).shape == (130, 200)


def test_bands_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    a, sfa, b, sfb, d = operands(50, 264, 300)
    expected = torch.empty_like(d)
    reference.gemm_nt(a, sfa, b, sfb, expected)
    for limit in (1, 264 * 7, 264 * 49):
        monkeypatch.setattr(reference, "_MAX_PARTIAL", limit)
        d.fill_(float("nan"))
        reference.gemm_nt(a, sfa, b, sfb, d)
        compare(d, expected)


def test_any_strides_and_output_dtypes() -> None:
    a, sfa, b, sfb, d = operands(33, 256, 384)
    reference.gemm_nt(a, sfa, b, sfb, d)
    wide = torch.full((33, 300), float("nan"), dtype=torch.bfloat16)
    native = torch.empty(3, 36).t()[:33].copy_(sfa)
    reference.gemm_nt(a, native, b, sfb.t().contiguous().t(), wide[:, 5:261])
    assert_bitwise_equal(wide[:, 5:261], d)
    assert wide[:, :5].isnan().all() and wide[:, 261:].isnan().all()
    full = torch.empty(33, 256)
    reference.gemm_nt(a, sfa, b, sfb, full)
    assert_bitwise_equal(full.bfloat16(), d)


def test_empty_sizes() -> None:
    for m, n, k in ((0, 64, 128), (3, 0, 128), (3, 64, 0)):
        a, sfa, b, sfb, d = operands(m, n, k)
        reference.gemm_nt(a, sfa, b, sfb, d)
        assert (d == 0).all()


def test_a_row_depends_on_itself_alone() -> None:
    a, sfa, b, sfb, clean = operands(40, 200, 300)
    reference.gemm_nt(a, sfa, b, sfb, clean)
    a.view(torch.uint8)[7] = 0x7F
    sfa[9] = float("inf")
    sfa[11, 1] = float("nan")
    dirty = torch.empty_like(clean)
    reference.gemm_nt(a, sfa, b, sfb, dirty)
    good = [row for row in range(40) if row not in (7, 9, 11)]
    assert_bitwise_equal(dirty[good], clean[good])
    assert dirty[[7, 11]].isnan().all() and not dirty[9].isfinite().any()


def test_scales_are_multiplied_first() -> None:
    a = torch.full((2, 128), 448.0).to(FP8)
    d = torch.empty(2, 8, dtype=torch.bfloat16)
    for large, small in ((1e38, 1e-38), (1e-30, 1e30)):
        sfa, sfb = torch.full((2, 1), large), torch.full((1, 1), small)
        reference.gemm_nt(a, sfa, a[:1].expand(8, 128), sfb, d)
        assert torch.allclose(d.float(), torch.tensor(128 * 448.0**2), rtol=1e-2)


def test_same_inputs_same_bits() -> None:
    a, sfa, b, sfb, first = operands(65, 264, 500)
    reference.gemm_nt(a, sfa, b, sfb, first)
    again = torch.empty_like(first)
    for _ in range(3):
        reference.gemm_nt(a, sfa, b, sfb, again)
        assert_bitwise_equal(again, first)
