"""Failures that users of such libraries reported in public, as tests: tests/data/cases.jsonl.

`test_cNNN_...` holds for the case of that id. Every case runs on the CPU, and on a Hopper GPU too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import checks
from deep_gemm.testing import assert_bitwise_equal, compare

FP8 = torch.float8_e4m3fn
TESTS = Path(__file__).parent
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(0)
    return request.param


def blocks(size: int) -> int:
    return -(-size // 128)


def make_pair(rows: int, k: int, device: str, scale_rows: int | None = None) -> Pair:
    """Random FP8 data and scales over several orders of magnitude; `scale_rows` as of a weight."""
    data = torch.randn(rows, k, device=device).to(FP8)
    scales = torch.rand(rows if scale_rows is None else scale_rows, blocks(k), device=device)
    return data, torch.exp2(scales * 8 - 4)


def make(m: int, n: int, k: int, device: str) -> tuple[Pair, Pair, torch.Tensor]:
    """Operands, and an output full of NaN."""
    d = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)
    return make_pair(m, k, device), make_pair(n, k, device, blocks(n)), d


def expand(data: torch.Tensor, scales: torch.Tensor, rows_per_scale: int = 1) -> torch.Tensor:
    """Dequantised to float64."""
    rows, k = data.shape
    scales = scales.double().repeat_interleave(128, dim=1)[:, :k]
    return data.double() * scales.repeat_interleave(rows_per_scale, dim=0)[:rows]


def check(a: Pair, b: Pair, d: torch.Tensor) -> None:
    """Run the GEMM and compare all of `d` with the dequantised float64 product."""
    deep_gemm.fp8_gemm_nt(a, b, d)
    compare(d, expand(*a) @ expand(*b, 128).t())


def refused(error: type[Exception], words: str, *arguments: Any, **keywords: Any) -> None:
    with pytest.raises(error, match=re.escape(words)):
        deep_gemm.fp8_gemm_nt(*arguments, **keywords)
    assert not deep_gemm.can_run(*arguments, **keywords)


def test_every_case_has_a_test() -> None:
    cases = [json.loads(line) for line in (TESTS / "data/cases.jsonl").read_text().splitlines()]
    sources = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    tested = set(re.findall(r"def test_(c\d{3})_", sources))
    assert not [case["id"] for case in cases if case["id"].lower() not in tested]


# Shapes


@pytest.mark.parametrize("m", [1, 2, 7, 32, 64, 65, 128])
@pytest.mark.parametrize("n, k", [(512, 1024), (1024, 512)])
def test_c018_few_rows_against_a_square_weight(m: int, n: int, k: int, device: str) -> None:
    factor = 1 if device == "cpu" else 16  # the reported size: 8192 and more
    check(*make(m, n * factor, k * factor, device))


@pytest.mark.parametrize("num_k_blocks", [1, 2, 3, 9])
def test_c032_odd_and_even_numbers_of_k_blocks(num_k_blocks: int, device: str) -> None:
    m, n = (200, 264) if device == "cpu" else (7168, 2048)
    check(*make(m, n, 128 * num_k_blocks, device))


@pytest.mark.parametrize("k", [16, 112, 128, 144, 240, 256, 272, 1136])
def test_c032_a_tail_of_k_shorter_than_a_block(k: int, device: str) -> None:
    check(*make(70, 136, k, device))


def test_c033_nine_k_blocks(device: str) -> None:
    check(*make(130, 512 if device == "cpu" else 7168, 1152, device))


@pytest.mark.gpu
def test_c034_output_beyond_2_to_the_31_elements() -> None:
    m, n, k = 73728, 36864, 128
    a, b, d = make(m, n, k, "cuda")
    deep_gemm.fp8_gemm_nt(a, b, d)
    weight = expand(*b, 128)
    for row in (0, 58240, m - 200):  # 58254 * n is the first beyond 2**31
        rows = slice(row, row + 200)
        compare(d[rows], expand(a[0][rows], a[1][rows]) @ weight.t())
    assert not any(part.isnan().any() for part in d.split(8192))


@pytest.mark.parametrize("m", [7, 9])
def test_c035_seven_and_nine_rows(m: int, device: str) -> None:
    check(*make(m, 256, 512, device))


def test_c039_a_shard_of_192(device: str) -> None:
    check(*make(50, 192, 256, device))
    check(*make(50, 256, 192, device))
    # a shard that starts inside a scale block cannot have scales of the right shape
    (data, scales), (weight, weight_scales), d = make(50, 768, 256, device)
    shard = weight[192:384], weight_scales[1:2]
    refused(ValueError, "sfb has shape (1, 2), expected (2, 2)", (data, scales), shard, d[:, :192])


@pytest.mark.parametrize("size", [16, 32, 64, 96])
def test_c040_dimensions_below_one_block(size: int, device: str) -> None:
    check(*make(33, size, 256, device))
    check(*make(33, 256, size, device))
    check(*make(33, size, size, device))


def test_c042_row_stride_is_refused_with_its_number(device: str) -> None:
    a, (_, scales), d = make(33, 64, 128, device)
    padded = torch.zeros(64, 136, dtype=torch.uint8, device=device).view(FP8)[:, :128]
    refused(ValueError, "b has row stride 136", a, (padded, scales), d)
    shifted = torch.zeros(64, 144, dtype=torch.uint8, device=device).view(FP8)[:, 8:136]
    refused(ValueError, "expected a multiple of 16 bytes", a, (shifted, scales), d)


def test_c043_any_number_of_rows(device: str) -> None:
    check(*make(5743 if device == "cuda" else 143, 128, 256, device))


@pytest.mark.parametrize("base", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("offset", [-1, 1, 63])
def test_c044_rows_off_every_tile(base: int, offset: int, device: str) -> None:
    check(*make(base + offset, 264, 256, device))


def test_c044_the_reported_shape(device: str) -> None:
    n, k = (256, 256) if device == "cpu" else (2048, 2048)
    check(*make(1088, n, k, device))


def test_c045_nothing_to_do(device: str) -> None:
    for m, n in ((0, 256), (3, 0), (0, 0)):
        a, b, d = make(m, n, 128, device)
        deep_gemm.fp8_gemm_nt(a, b, d)
    _, _, poison = make(3, 64, 128, device)
    a, b, _ = make(0, 64, 128, device)
    deep_gemm.fp8_gemm_nt(a, b, poison[:0])
    assert poison.isnan().all()
    a, b, d = make(3, 64, 0, device)
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert (d == 0).all()


# Layouts


def test_c036_aligning_scales_of_any_number_of_rows(device: str) -> None:
    for rows in range(1, 10):
        for shape in ((rows, 3), (1, rows, 3), (2, rows, 3), (3, rows, 3)):
            scales = torch.rand(shape, device=device)
            aligned = deep_gemm.get_mn_major_tma_aligned_tensor(scales)
            assert torch.equal(aligned, scales)
            assert aligned.stride()[-2:] == (1, -(-rows // 4) * 4)


@pytest.mark.parametrize("layout", ["row-major", "mn-major", "native", "padded", "expanded"])
def test_c060_any_layout_of_activation_scales_gives_the_same_bits(layout: str, device: str) -> None:
    (data, scales), b, d = make(61, 256, 384, device)
    if layout == "expanded":
        scales = scales[:1].expand(61, 3)
    row_major = scales.contiguous()
    variants = {
        "row-major": row_major,
        "mn-major": row_major.t().contiguous().t(),
        "native": deep_gemm.get_mn_major_tma_aligned_tensor(row_major),
        "padded": torch.nn.functional.pad(row_major, (0, 5))[:, :3],
        "expanded": scales,
    }
    other = torch.full_like(d, float("nan"))
    check((data, row_major), b, d)
    deep_gemm.fp8_gemm_nt((data, variants[layout]), b, other)
    assert_bitwise_equal(d, other)


def test_c060_our_quantiser_writes_the_native_layout(device: str) -> None:
    for m in (1, 61, 64):
        x = torch.randn(m, 384, device=device, dtype=torch.bfloat16)
        _, scales = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False)
        assert deep_gemm.get_mn_major_tma_aligned_tensor(scales) is scales


@pytest.mark.parametrize("m, n, k", [(1, 64, 128), (1, 256, 128), (5, 64, 256), (1, 256, 256)])
def test_c061_strides_of_single_blocks_do_not_matter(m: int, n: int, k: int, device: str) -> None:
    (a, sfa), (b, sfb), d = make(m, n, k, device)

    def odd_strides(x: torch.Tensor) -> torch.Tensor:
        strides = [s if size > 1 else 977 for s, size in zip(x.stride(), x.shape, strict=True)]
        return x.as_strided(x.shape, strides)

    check((odd_strides(a), odd_strides(sfa)), (odd_strides(b), odd_strides(sfb)), odd_strides(d))


def test_c062_square_scales_are_never_transposed_by_guess(device: str) -> None:
    (a, sfa), (b, sfb), d = make(3, 384, 384, device)  # both scale tensors are 3 x 3
    assert sfa.shape == sfb.shape == (3, 3)
    check((a, sfa), (b, sfb), d)
    swapped = torch.empty_like(d)
    check((a, sfa.t().contiguous()), (b, sfb.t().contiguous()), swapped)
    assert not torch.equal(d, swapped)


def test_c063_the_documented_example_runs() -> None:
    text = deep_gemm.__doc__ or ""
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    namespace: dict[str, Any] = {}
    exec("\n".join(lines), namespace)
    a, b, d = (namespace[name] for name in "abd")
    compare(d, expand(*a) @ expand(*b, 128).t())


def test_c063_scales_of_the_wrong_convention_are_refused(device: str) -> None:
    (a, sfa), (b, sfb), d = make(64, 256, 384, device)
    refused(ValueError, "pass sfa.t()", (a, sfa.t()), (b, sfb), d)
    refused(ValueError, "pass sfb.t()", (a, sfa), (b, sfb.t()), d)


def test_c064_weight_scales_per_row_are_refused(device: str) -> None:
    a, (b, _), d = make(64, 256, 384, device)
    per_row = torch.ones(256, 3, device=device)
    refused(ValueError, "sfb has shape (256, 3), expected (2, 3)", a, (b, per_row), d)
    gaps = torch.ones(2, 6, device=device)[:, ::2]
    refused(ValueError, "sfb has strides (6, 2)", a, (b, gaps), d)


def test_c065_input_gradient_takes_the_transposed_scales(device: str) -> None:
    """dx = dy @ w, w being stored as [out, in]: transposed data, transposed scales."""
    tokens, out_features, in_features = 50, 384, 640
    w = torch.randn(out_features, in_features, device=device)
    data, scales = deep_gemm.per_block_cast_to_fp8(w, use_ue8m0=False)
    dy = make_pair(tokens, out_features, device)
    dx = torch.empty(tokens, in_features, dtype=torch.bfloat16, device=device)
    check(dy, (data.t().contiguous(), scales.t()), dx)
    again = torch.empty_like(dx)
    deep_gemm.fp8_gemm_nn(dy, (data.t().contiguous().t(), scales), again)
    assert_bitwise_equal(dx, again)


def test_c066_weight_scales_stay_in_the_checkpoint_layout(device: str) -> None:
    a, (weight, scales), d = make(20, 384, 640, device)
    before, version = scales.clone(), scales._version
    same = deep_gemm.transform_sf_into_required_layout(
        scales, mn=384, k=640, recipe=(1, 128, 128), is_sfa=False
    )
    assert same is scales
    check(a, (weight, scales), d)
    assert torch.equal(scales, before) and scales._version == version
    scales.mul_(2)  # a refit in place is seen by the next call
    check(a, (weight, scales), d)


def test_c067_rows_further_apart_than_their_width(device: str) -> None:
    m, n, k = 70, 264, 272
    (a, sfa), (b, sfb), d = make(m, n, k, device)
    expected = torch.empty_like(d)
    check((a, sfa), (b, sfb), expected)
    wide_a, wide_b = make_pair(m, k + 48, device)[0], make_pair(n, k + 16, device)[0]
    wide_a[:, :k], wide_b[:, :k] = a, b
    wide_d = torch.full((m, n + 8), float("nan"), dtype=torch.bfloat16, device=device)
    deep_gemm.fp8_gemm_nt((wide_a[:, :k], sfa), (wide_b[:, :k], sfb), wide_d[:, :n])
    assert_bitwise_equal(wide_d[:, :n], expected)
    assert wide_d[:, n:].isnan().all()


# Values


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
def test_c021_a_row_depends_on_nothing_but_itself(poison: float, device: str) -> None:
    (a, sfa), b, clean = make(140, 264, 384, device)
    check((a, sfa), b, clean)
    dirty = torch.empty_like(clean)
    bad_rows = torch.tensor([0, 63, 64, 130])
    a, sfa = a.clone(), sfa.clone()
    a.view(torch.uint8)[bad_rows] = 0x7F  # NaN
    sfa[bad_rows] = poison
    deep_gemm.fp8_gemm_nt((a, sfa), b, dirty)
    good_rows = torch.ones(140, dtype=torch.bool)
    good_rows[bad_rows] = False
    assert_bitwise_equal(dirty[good_rows], clean[good_rows])
    assert dirty[bad_rows].isnan().all()


def test_c022_padding_of_scales_is_never_read(device: str) -> None:
    m = 61
    (a, sfa), b, clean = make(m, 264, 384, device)
    check((a, sfa), b, clean)
    for poison in (float("nan"), float("inf"), -1e30):
        aligned = torch.full((3, 64), poison, device=device).t()[:m]
        aligned.copy_(sfa)
        assert deep_gemm.get_mn_major_tma_aligned_tensor(aligned) is aligned
        dirty = torch.empty_like(clean)
        deep_gemm.fp8_gemm_nt((a, aligned), b, dirty)
        assert_bitwise_equal(dirty, clean)


def test_c025_scales_keep_every_bit(device: str) -> None:
    (a, _), (b, _), d = make(64, 256, 384, device)
    sfa = torch.full((64, 3), 1.9999999, device=device)  # reading the exponent alone gives 1
    sfb = torch.full((2, 3), 0.7500001, device=device)
    check((a, sfa), (b, sfb), d)
    packed = torch.ones(64, 1, dtype=torch.int32, device=device)
    refused(TypeError, "sfa has dtype torch.int32", (a, packed), (b, sfb), d)


def test_c026_scales_are_not_rounded_unless_asked(device: str) -> None:
    x = torch.full((4, 128), 3.0, device=device)
    _, scales = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False)
    assert torch.allclose(scales, torch.tensor(3 / 448, device=device), rtol=1e-6, atol=0)


@given(st.integers(0, 0x7F7FFFFF))
def test_c027_powers_of_two_are_exact_and_never_below(bits: int) -> None:
    x = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    rounded = deep_gemm.ceil_to_ue8m0(x)
    assert int(rounded.view(torch.int32)) & 0x7FFFFF == 0
    value, power = float(x), float(rounded)
    if 2.0**-126 <= value <= 2.0**127:
        assert power / 2 < value <= power


def test_c028_the_scale_format_is_an_argument_of_each_call(device: str) -> None:
    x = torch.randn(16, 256, device=device)
    _, plain = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False)
    _, powers = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=True)
    _, plain_again = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False)
    assert_bitwise_equal(plain, plain_again)
    assert ((powers.contiguous().view(torch.int32) & 0x7FFFFF) == 0).all()
    assert (powers >= plain).all() and not torch.equal(powers, plain)


@pytest.mark.parametrize("cast", ["per_token_cast_to_fp8", "per_block_cast_to_fp8"])
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_c029_zero_blocks(cast: str, use_ue8m0: bool, device: str) -> None:
    x = torch.randn(256, 256, device=device, dtype=torch.bfloat16)
    x[:128, :128] = 0
    x[3, 128:] = 0
    x[4, 128:] = -0.0
    x[5, 128:] = 0
    x[5, 200] = 2.0**-133  # a subnormal
    data, scales = getattr(deep_gemm, cast)(x, use_ue8m0=use_ue8m0)
    assert scales.isfinite().all() and (scales > 0).all()
    assert (data[:128, :128].float() == 0).all() and (data[3:5, 128:].float() == 0).all()
    assert not data.float().isnan().any()
    a, b, d = make(256, 256, 256, device)
    if cast == "per_token_cast_to_fp8":
        a = data, scales
    else:
        b = data, scales
    check(a, b, d)


def test_c030_small_values_keep_their_range(device: str) -> None:
    x = torch.randn(8, 256, device=device) * 1e-3
    data, scales = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0=False)
    compare(expand(data, scales), x, tol=1e-3)


# Everything else


@pytest.mark.gpu
def test_c056_a_mix_of_devices_is_refused_after_a_good_call_too() -> None:
    (a, sfa), (b, sfb), d = make(64, 256, 384, "cuda")
    sfa = deep_gemm.get_mn_major_tma_aligned_tensor(sfa)
    check((a, sfa), (b, sfb), d)
    refused(ValueError, "expected cpu where a is", (a.cpu(), sfa), (b, sfb), d)
    refused(ValueError, "sfa is on cpu", (a, sfa.cpu()), (b, sfb), d)
    refused(ValueError, "sfb is on cpu", (a, sfa), (b, sfb.cpu()), d)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("current", [0, 1])
def test_c056_the_tensors_device_decides(current: int) -> None:
    with torch.cuda.device(current):
        for index in (0, 1, 0):
            check(*make(65, 264, 384, f"cuda:{index}"))


def test_c099_only_metadata_is_read() -> None:
    deep_gemm.set_backend("reference")  # the one that takes any device
    a, b, d = make(64, 256, 384, "meta")  # meta tensors have no values that could be read
    assert checks.check_dense(a, b, d).m == 64
    powers = torch.empty(16, 8, device="meta")
    assert deep_gemm.pack_ue8m0_to_int(powers).shape == (16, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("native", [True, False])
def test_c099_a_call_does_not_synchronise(native: bool) -> None:
    (a, sfa), b, d = make(64, 256, 384, "cuda")
    if native:
        sfa = deep_gemm.get_mn_major_tma_aligned_tensor(sfa)
    deep_gemm.fp8_gemm_nt((a, sfa), b, d)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        deep_gemm.fp8_gemm_nt((a, sfa), b, d)
        deep_gemm.fp8_gemm_nt((a, sfa), b, torch.empty_like(d))
    finally:
        torch.cuda.set_sync_debug_mode("default")
