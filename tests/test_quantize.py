"""The casts to FP8 against their formula in NumPy, and what their kernels compile to."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm import jit, launch, quantize
from deep_gemm.jit import cubin
from deep_gemm.quantize import (
    ceil_to_ue8m0,
    pack_ue8m0_to_int,
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_custom_dims_cast_to_fp8,
    per_token_cast_to_fp8,
    unpack_ue8m0_from_int,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN_CODE = 0x7F
BLOCKS: dict[Callable[..., Any], Callable[[int], tuple[int, int]]] = {
    per_token_cast_to_fp8: lambda gran_k: (1, gran_k),
    per_channel_cast_to_fp8: lambda gran_k: (gran_k, 1),
    per_block_cast_to_fp8: lambda gran_k: (gran_k, gran_k),
}
casts = pytest.mark.parametrize("cast", BLOCKS, ids=lambda cast: cast.__name__)

# The finite codes 0x00 to 0x7E of E4M3, ascending.
E4M3 = np.array([2.0**-9 * c if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(0x7F)])


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Codes of the nearest numbers, of two equally near ones the even code; saturating."""
    magnitude = np.abs(x).astype(np.float64)
    upper = np.searchsorted(E4M3, magnitude).clip(1, 0x7E)
    below, above = magnitude - E4M3[upper - 1], E4M3[upper] - magnitude
    takes_lower = (below < above) | ((below == above) & (upper % 2 == 1))
    return (upper - takes_lower + 0x80 * np.signbit(x)).astype(np.uint8)


def oracle(
    x: torch.Tensor, block: tuple[int, int], use_ue8m0: bool = False, amax_floor: float = 1e-4
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of finite `x`, block by block."""
    values = x.float().numpy()
    codes = np.empty(values.shape, np.uint8)
    sf = np.empty([-(-size // b) for size, b in zip(values.shape, block, strict=True)], np.float32)
    for i, j in np.ndindex(*sf.shape):
        part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        amax = max(np.abs(values[part]).max(), np.float32(amax_floor))
        scale = amax / np.float32(448)
        if use_ue8m0:
            fraction, exponent = math.frexp(scale)
            scale = np.float32(math.ldexp(1, exponent - (fraction == 0.5)))
        codes[part] = to_e4m3(values[part] * (np.float32(1) / scale))
        sf[i, j] = scale
    return codes, sf


def codes(q: torch.Tensor) -> np.ndarray:
    return q.view(torch.uint8).numpy()


def dequantise(q: torch.Tensor, sf: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    sf = sf.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return q.double() * sf[: q.shape[0], : q.shape[1]]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers whose magnitude changes from row to row and from column to column."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-10, 10, (shape[0], 1)))
    return (x * torch.exp2(torch.randint(-2, 3, (1, shape[1])))).to(dtype)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# The formula


def test_torch_rounds_as_e4m3_does() -> None:
    table = torch.from_numpy(E4M3).float()
    middles = (table[1:] + table[:-1]) / 2
    zero, infinity = torch.zeros(()), torch.full((), math.inf)
    points = [table, middles, middles.nextafter(zero), middles.nextafter(infinity)]
    points += [torch.tensor([448.001, 2.0**-149, 2.0**-11])]
    x = torch.cat([torch.cat(points), -torch.cat(points)])
    assert (codes(x.to(torch.float8_e4m3fn)) == to_e4m3(x.numpy())).all()


@casts
@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_formula(
    cast: Callable[..., Any], dtype: torch.dtype, use_ue8m0: bool
) -> None:
    for shape in ((1, 1), (3, 128), (130, 144), (257, 300)):
        x = random(*shape, dtype=dtype)
        q, sf = cast(x, use_ue8m0)
        expected_codes, expected_sf = oracle(x, BLOCKS[cast](128), use_ue8m0)
        assert (codes(q) == expected_codes).all()
        assert (sf.numpy() == expected_sf).all()


@casts
@pytest.mark.parametrize("gran_k", [32, 64])
def test_other_granularities(cast: Callable[..., Any], gran_k: int) -> None:
    x = random(100, 200)
    q, sf = cast(x, use_ue8m0=False, gran_k=gran_k)
    expected_codes, expected_sf = oracle(x, BLOCKS[cast](gran_k))
    assert (codes(q) == expected_codes).all()
    assert (sf.numpy() == expected_sf).all()


@casts
@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40),
    st.integers(-100, 127),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_round_trip_error(
    cast: Callable[..., Any],
    values: list[float],
    exponent: int,
    use_ue8m0: bool,
    dtype: torch.dtype,
) -> None:
    x = torch.tensor(values).mul(2.0**exponent).to(dtype)
    x = x.masked_fill(x.isinf(), 0)  # float16 ends at 65504
    x = x[None] if len(values) % 2 else x[:, None]
    q, sf = cast(x, use_ue8m0, amax_floor=6e-36)
    error = (dequantise(q, sf, BLOCKS[cast](128)) - x.double()).abs()
    step = dequantise(torch.ones_like(q.float()), sf, BLOCKS[cast](128))
    bound = torch.maximum(2.0**-4 * x.double().abs(), 2.0**-10 * step)
    assert (error <= bound * (1 + 2.0**-20)).all()


# Special values


@casts
def test_whole_range_is_used_and_exact_where_it_can_be(cast: Callable[..., Any]) -> None:
    x = torch.from_numpy(np.concatenate([E4M3, -E4M3])).float().repeat(127, 1)[:, ::2]
    if cast is per_channel_cast_to_fp8:
        x = x.t()
    for exponent in (-20, 0, 100):  # amax = 448: the scale is a power of two by itself
        q, sf = cast(x * 2.0**exponent, use_ue8m0=False)
        assert (sf == 2.0**exponent).all()
        assert torch.equal(q.double(), x.double())


@casts
@given(st.integers(-120, 120), st.integers(0, 14))
def test_powers_of_two_are_exact_with_ue8m0(
    cast: Callable[..., Any], exponent: int, smaller: int
) -> None:
    x = torch.tensor([[2.0**exponent, -(2.0 ** (exponent - smaller))]])
    q, sf = cast(x, use_ue8m0=True, amax_floor=6e-36)
    assert torch.equal(dequantise(q, sf, BLOCKS[cast](128)), x.double())


@casts
@pytest.mark.parametrize("use_ue8m0", [False, True])
def test_zeros_keep_their_sign_and_get_a_finite_scale(
    cast: Callable[..., Any], use_ue8m0: bool
) -> None:
    for zero, code in ((0.0, 0x00), (-0.0, 0x80)):
        q, sf = cast(torch.full((3, 200), zero), use_ue8m0)
        assert (codes(q) == code).all()
        assert (sf == (2.0**-22 if use_ue8m0 else np.float32(1e-4) / np.float32(448))).all()
    q, sf = cast(torch.zeros(2, 3), use_ue8m0, amax_floor=6e-36)
    assert (codes(q) == 0).all() and (sf >= 2.0**-126).all()


@casts
@pytest.mark.parametrize("value", [1e-30, -1e38, torch.finfo(torch.float32).max, 3.0, -(2.0**-100)])
def test_one_number_among_zeros(cast: Callable[..., Any], value: float) -> None:
    x = torch.zeros(130, 130)
    x[129, 7] = value
    q, sf = cast(x, use_ue8m0=False, amax_floor=6e-36)
    assert codes(q)[129, 7] == (0x7E if value > 0 else 0xFE)
    assert (codes(q) != 0).sum() == 1
    assert sf.isfinite().all()
    assert dequantise(q, sf, BLOCKS[cast](128))[129, 7] == pytest.approx(value, rel=1e-6)


@casts
def test_subnormal_numbers(cast: Callable[..., Any]) -> None:
    x = torch.tensor([[2.0**-149, -(2.0**-130), 2.0**-127]])
    q, _ = cast(x, use_ue8m0=True)
    assert (codes(q) == [[0, 0x80, 0]]).all()
    q, sf = cast(x, use_ue8m0=True, amax_floor=448 * 2.0**-126)
    assert (sf == 2.0**-126).all()
    assert (q.float() == torch.tensor([[0, -(2.0**-4), 2.0**-1]])).all()


@casts
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_become_nan_and_touch_nothing_else(
    cast: Callable[..., Any], dtype: torch.dtype
) -> None:
    x = random(260, 260, dtype=dtype)
    at = (torch.tensor([0, 3, 200, 259]), torch.tensor([5, 5, 131, 259]))
    x[at] = 0
    expected_q, expected_sf = cast(x, use_ue8m0=False)
    x[at] = torch.tensor([math.nan, math.inf, -math.inf, -math.nan], dtype=dtype)
    q, sf = cast(x, use_ue8m0=False)
    assert torch.equal(sf, expected_sf)
    expected = codes(expected_q).copy()
    expected[at] = NAN_CODE
    assert (codes(q) == expected).all()
    q, sf = cast(torch.full((4, 4), math.nan), use_ue8m0=False)
    assert (codes(q) == NAN_CODE).all() and (sf == np.float32(1e-4) / np.float32(448)).all()


@casts
def test_floor_of_amax_is_an_argument(cast: Callable[..., Any]) -> None:
    x = torch.randn(64, 64) * 1e-9
    x[0] = x[:, 0] = 3e-9  # so that every block has it
    block = BLOCKS[cast](128)
    q, sf = cast(x, use_ue8m0=False)
    assert (sf == np.float32(1e-4) / np.float32(448)).all()
    coarse = (dequantise(q, sf, block) - x.double()).norm()
    q, sf = cast(x, use_ue8m0=False, amax_floor=1e-20)
    assert (sf < 1e-10).all()
    assert (dequantise(q, sf, block) - x.double()).norm() < 0.5 * coarse
    with pytest.raises(ValueError, match="amax_floor is 1e-40, expected 5.27e-36 to"):
        cast(x, use_ue8m0=False, amax_floor=1e-40)
    with pytest.raises(ValueError, match="amax_floor is nan"):
        cast(x, use_ue8m0=False, amax_floor=math.nan)


# Layouts and arguments


@pytest.mark.parametrize("m", [0, 1, 3, 4, 5, 130])
@pytest.mark.parametrize("k", [0, 16, 128, 130, 400])
def test_shapes_and_strides(m: int, k: int) -> None:
    blocks = -(-k // 128)
    x = torch.randn(m, k)
    q, sf = per_token_cast_to_fp8(x)
    assert (q.shape, q.dtype, q.is_contiguous()) == (x.shape, torch.float8_e4m3fn, True)
    assert (sf.shape, sf.dtype) == ((m, blocks), torch.float32)
    if m > 1 and blocks > 1:
        assert sf.stride() == (1, -(-m // 4) * 4)
    q, sf = per_channel_cast_to_fp8(x)
    assert (q.shape, sf.shape) == (x.shape, (-(-m // 128), k))
    assert q.is_contiguous() and sf.is_contiguous()
    q, sf = per_block_cast_to_fp8(x)
    assert (q.shape, sf.shape) == (x.shape, (-(-m // 128), blocks))
    assert q.is_contiguous() and sf.is_contiguous()


@casts
def test_any_strides(cast: Callable[..., Any]) -> None:
    x = random(70, 144)
    expected = cast(x, use_ue8m0=False)
    wide = torch.full((70, 160), math.nan)
    wide[:, 3:147] = x
    for view in (wide[:, 3:147], x.t().contiguous().t()):
        q, sf = cast(view, use_ue8m0=False)
        assert (codes(q) == codes(expected[0])).all() and torch.equal(sf, expected[1])
        assert q.is_contiguous()
    q, _ = cast(x[:1].expand(70, 144), use_ue8m0=False)
    assert (codes(q) == codes(q)[0]).all()


@casts
def test_input_is_left_alone(cast: Callable[..., Any]) -> None:
    x = random(30, 128).requires_grad_()
    before = x.detach().clone()
    q, sf = cast(x, use_ue8m0=True)
    assert torch.equal(x, before)
    assert not q.requires_grad and not sf.requires_grad


def test_packed_scales() -> None:
    x = random(33, 700)
    q, sf = per_token_cast_to_fp8(x, use_ue8m0=True)
    packed_q, packed = per_token_cast_to_fp8(x, True, 128, True)
    assert (codes(q) == codes(packed_q)).all()
    assert (packed.shape, packed.stride(), packed.dtype) == ((33, 2), (1, 36), torch.int32)
    assert torch.equal(unpack_ue8m0_from_int(packed)[:, :6], sf)
    with pytest.raises(ValueError, match="use_packed_ue8m0 needs use_ue8m0=True"):
        per_token_cast_to_fp8(x, use_ue8m0=False, use_packed_ue8m0=True)


def test_custom_dimensions() -> None:
    x = torch.randn(5, 6, 7)
    q, sf = per_custom_dims_cast_to_fp8(x, (0, 2), use_ue8m0=False)
    assert (q.shape, sf.shape) == ((5, 6, 7), (5, 7))
    for i, j in itertools.product(range(5), range(7)):
        expected_q, expected_sf = per_token_cast_to_fp8(x[i, :, j].reshape(1, 6))
        assert (codes(q)[i, :, j] == codes(expected_q)[0]).all() and sf[i, j] == expected_sf
    assert torch.equal(per_custom_dims_cast_to_fp8(x, (-1, 0), False)[1], sf)
    assert per_custom_dims_cast_to_fp8(x, (), use_ue8m0=True)[1].shape == ()
    assert per_custom_dims_cast_to_fp8(x[:1], (0,), use_ue8m0=True)[1].shape == (1,)
    with pytest.raises(ValueError, match="dims has 3"):
        per_custom_dims_cast_to_fp8(x, (0, 3), use_ue8m0=False)
    with pytest.raises(TypeError, match="x has dtype"):
        per_custom_dims_cast_to_fp8(x.double(), (0,), use_ue8m0=False)


@casts
def test_arguments_that_are_refused(cast: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="x is a list, expected a torch.Tensor"):
        cast([[1.0]], use_ue8m0=False)
    with pytest.raises(TypeError, match=r"x has dtype torch.float64.*x.float\(\)"):
        cast(torch.zeros(2, 2, dtype=torch.float64), use_ue8m0=False)
    with pytest.raises(
        ValueError, match=r"x has shape \(2, 3, 4\), expected 2 dimensions; flatten"
    ):
        cast(torch.zeros(2, 3, 4), use_ue8m0=False)
    with pytest.raises(ValueError, match=r"gran_k is 100, expected one of \(32, 64, 128\)"):
        cast(torch.zeros(2, 2), use_ue8m0=False, gran_k=100)


# UE8M0


@given(st.integers(0, 0x7FFFFFFF), st.booleans())
def test_ceil_to_ue8m0(bits: int, is_negative: bool) -> None:
    x = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    power = float(ceil_to_ue8m0(-x if is_negative else x))
    value = float(x)
    if not math.isfinite(value):
        assert math.isnan(power)
    elif value <= 2.0**-126:
        assert power == 2.0**-126
    elif value > 2.0**127:
        assert power == 2.0**127
    else:
        assert math.frexp(power)[0] == 0.5
        assert power / 2 < value <= power


def test_ceil_to_ue8m0_of_every_power_and_its_neighbours() -> None:
    powers = torch.exp2(torch.arange(-126, 128).double()).float()
    assert torch.equal(ceil_to_ue8m0(powers), powers)
    assert torch.equal(ceil_to_ue8m0(powers.nextafter(torch.zeros(()))), powers)
    above = powers[:-1].nextafter(torch.full((), math.inf))
    assert torch.equal(ceil_to_ue8m0(above), powers[1:])
    assert ceil_to_ue8m0(torch.tensor([3.0], dtype=torch.bfloat16)).dtype == torch.float32


def test_packing_is_reversible() -> None:
    every_code = torch.arange(256, dtype=torch.uint8).view(torch.int32).view(4, 16)
    unpacked = unpack_ue8m0_from_int(every_code)
    expected = torch.exp2(torch.arange(-127, 129).double()).float().view(4, 64)
    assert torch.equal(unpacked.view(-1)[:255], expected.view(-1)[:255])
    assert unpacked[3, 63].isnan()
    assert torch.equal(pack_ue8m0_to_int(unpacked), every_code)
    for column in (every_code.t(), every_code.t()[:, :1]):
        assert torch.equal(unpack_ue8m0_from_int(column)[:, :4].mT, unpacked[0].view(16, 4).mT)
    assert int(pack_ue8m0_to_int(torch.tensor([1.0, 2.0, 4.0, 8.0]))) & 0xFFFFFFFF == 0x8281807F


def test_packing_refuses_what_it_would_lose() -> None:
    with pytest.raises(ValueError, match=r"no power of two, such as 3\.0.*ceil_to_ue8m0"):
        pack_ue8m0_to_int(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    with pytest.raises(ValueError, match="multiple of 4"):
        pack_ue8m0_to_int(torch.ones(4, 3))
    with pytest.raises(TypeError, match="x has dtype torch.float64"):
        pack_ue8m0_to_int(torch.ones(4, dtype=torch.float64))
    with pytest.raises(TypeError, match="packed_sf is torch.float32"):
        unpack_ue8m0_from_int(torch.ones(4))


# Kernels, without a GPU


@pytest.fixture
def launched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[tuple[str, dict[str, int], Any, Any]]:
    """Kernel, constants, launch config and arguments of casts, which are not launched."""
    calls: list[tuple[str, dict[str, int], Any, Any]] = []

    def run(
        kernel: tuple[str, dict[str, int]], config: Any, args: ctypes.Structure, _: int
    ) -> None:
        calls.append((*kernel, config, args))

    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(quantize, "_has_kernel", lambda x: True)
    monkeypatch.setattr(jit, "load_kernel", lambda kernel, constants: (kernel, constants))
    monkeypatch.setattr(launch, "run", run)
    return calls


@casts
def test_empty_tensors_launch_nothing(cast: Callable[..., Any], launched: list[Any]) -> None:
    for shape in ((0, 128), (7, 0), (0, 0)):
        q, _ = cast(torch.zeros(shape), use_ue8m0=False)
        assert tuple(q.shape) == shape
    assert not launched


@casts
def test_sizes_that_are_launched(cast: Callable[..., Any], launched: list[Any]) -> None:
    storage = torch.zeros(131, 400, dtype=torch.bfloat16)
    cast(storage[:, :384], use_ue8m0=True, amax_floor=0.5)
    (kernel, constants, config, args) = launched[0]
    assert kernel == f"{cast.__name__.removesuffix('_to_fp8')}"
    assert config.threads == constants["NUM_THREADS"] == 256
    # 17 groups of 8 rows x 3 blocks, 8 to a CTA; 2 x 3 blocks
    assert config.grid == (7 if cast is per_token_cast_to_fp8 else 6)
    assert (args.x, args.rows, args.cols) == (storage.data_ptr(), 131, 384)
    assert (args.stride_row, args.stride_col, args.use_ue8m0, args.amax_floor) == (400, 1, 1, 0.5)
    assert args.sf_stride == {per_token_cast_to_fp8: 132, per_block_cast_to_fp8: 3}.get(cast, 384)


@casts
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_which_inputs_are_read_in_pieces_of_16_bytes(
    cast: Callable[..., Any], dtype: torch.dtype, launched: list[Any]
) -> None:
    storage = torch.zeros(8, 424, dtype=dtype)
    step = 16 // storage.element_size()
    for view, is_aligned in (
        (storage[:, :416], True),
        (storage[:, step : step + 400], True),
        (storage[:, 1:401], False),
        (storage[:, :408], False),
        (storage.view(-1)[: 8 * 403].view(8, 403)[:, :400], False),
        (storage.view(-1)[: 8 * 400].view(400, 8).t(), False),
        (storage[:1, :400], True),
        (storage[:1, :400].expand(8, 400), True),
    ):
        cast(view, use_ue8m0=False)
        assert launched.pop()[1]["IS_ALIGNED"] is is_aligned


@casts
@pytest.mark.parametrize(
    "dtype, gran_k",
    [*((dtype, 128) for dtype in DTYPES), (torch.bfloat16, 64), (torch.bfloat16, 32)],
    ids=str,
)
@pytest.mark.parametrize("is_aligned", [True, False])
def test_kernels_compile_without_spills(
    cast: Callable[..., Any], dtype: torch.dtype, gran_k: int, is_aligned: bool, launched: list[Any]
) -> None:
    cast(torch.zeros(4, 256 if is_aligned else 257, dtype=dtype), use_ue8m0=False, gran_k=gran_k)
    kernel, constants = launched[0][:2]
    assert constants["IS_ALIGNED"] is is_aligned
    code = jit.build(kernel, constants)
    resources = cubin.kernels(code)[kernel]
    assert resources.frame_bytes == 0
    if not is_aligned:
        return
    assert resources.registers <= (112 if dtype == torch.float32 else 80)  # 2 or 3 CTAs on an SM
    if cubin._nvdisasm() is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    sass = cubin.disassemble(code)
    pieces = constants["NUM_CHUNKS"] * dtype.itemsize
    assert re.findall(r"LDG\.E\S*", sass) == ["LDG.E.128.CONSTANT"] * pieces
    assert len(re.findall(r"STG\.E\.128", sass)) == constants["NUM_CHUNKS"]
    counts = cubin.opcode_counts(sass)
    assert counts["F2FP"] == constants["NUM_CHUNKS"] * 8  # two elements each
    assert not counts["LDL"] and not counts["STL"]
