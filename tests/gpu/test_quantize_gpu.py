"""The casts and the transposing kernel on a GPU: the bits of the CPU path for any input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deep_gemm import launch
from deep_gemm.config import settings
from deep_gemm.layout import get_mn_major_tma_aligned_tensor, native_sfa
from deep_gemm.quantize import (
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_token_cast_to_fp8,
)
from deep_gemm.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu

CASTS = [per_token_cast_to_fp8, per_channel_cast_to_fp8, per_block_cast_to_fp8]
casts = pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.__name__)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "wide": lambda x: torch.nn.functional.pad(x, (0, 16), value=math.nan)[:, : x.shape[1]],
    "unaligned": lambda x: torch.nn.functional.pad(x, (1, 2), value=math.nan)[:, 1:-2],
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def check(cast: Callable[..., Any], x: torch.Tensor, **options: Any) -> None:
    """`cast` of `x` on the GPU has the bits and strides of the cast on the CPU."""
    expected_q, expected_sf = cast(x.cpu(), **options)
    q, sf = cast(x, **options)
    assert q.is_contiguous()
    assert sf.stride() == expected_sf.stride() or 1 in sf.shape or sf.numel() == 0
    assert_bitwise_equal(sf.cpu(), expected_sf, "sf")
    assert_bitwise_equal(q.cpu(), expected_q, "q")


def random_bits(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Every kind of number: subnormal, huge, NaN, infinite."""
    bits = torch.randint(-(2**31), 2**31, (m, k), dtype=torch.int64, device="cuda")
    if dtype == torch.float32:
        return bits.to(torch.int32).view(dtype)
    return bits.to(torch.int16).view(dtype)


@casts
@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_of_the_cpu(cast: Callable[..., Any], dtype: torch.dtype, layout: str) -> None:
    for m, k in ((1, 16), (5, 128), (130, 272), (257, 131), (1000, 1040), (64, 7168), (4, 17)):
        x = LAYOUTS[layout](torch.randn(m, k, device="cuda").to(dtype))
        for use_ue8m0 in (False, True):
            check(cast, x, use_ue8m0=use_ue8m0)


@casts
@dtypes
@pytest.mark.parametrize("gran_k", [32, 64, 128])
@pytest.mark.parametrize("amax_floor", [6e-36, 1e-4])
def test_any_bit_pattern(
    cast: Callable[..., Any], dtype: torch.dtype, gran_k: int, amax_floor: float
) -> None:
    for m, k in ((300, 400), (129, 131)):
        x = random_bits(m, k, dtype)
        for use_ue8m0 in (False, True):
            check(cast, x, use_ue8m0=use_ue8m0, gran_k=gran_k, amax_floor=amax_floor)


@casts
@dtypes
def test_every_magnitude(cast: Callable[..., Any], dtype: torch.dtype) -> None:
    """Blocks of one magnitude each, and products next to the middle of two e4m3 numbers."""
    x = torch.randn(512, 1024, device="cuda")
    x *= torch.exp2(torch.randint(-120, 120, (512, 1), device="cuda").float())
    for options in ({"use_ue8m0": False}, {"use_ue8m0": True}):
        check(cast, x.to(dtype), amax_floor=6e-36, **options)
    codes = torch.arange(0x7F, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([middles, middles[:1] * 0 + 448, -codes[:1]]).repeat(128, 1)
    if cast is per_channel_cast_to_fp8:
        x = x.t().contiguous()
    up, down = torch.full_like(x, math.inf), torch.full_like(x, -math.inf)
    for values in (x, -x, x.nextafter(up), x.nextafter(down)):
        check(cast, values, use_ue8m0=False)


@casts
def test_empty_tensors(cast: Callable[..., Any]) -> None:
    for shape in ((0, 128), (7, 0)):
        q, _ = cast(torch.zeros(shape, device="cuda"), use_ue8m0=False)
        assert tuple(q.shape) == shape


def test_packed_scales() -> None:
    x = torch.randn(33, 700, device="cuda")
    _, expected = per_token_cast_to_fp8(x.cpu(), True, 128, True)
    _, packed = per_token_cast_to_fp8(x, True, 128, True)
    assert packed.stride() == expected.stride()
    assert_bitwise_equal(packed.cpu(), expected)


@casts
def test_c052_beyond_2_to_the_31_elements(cast: Callable[..., Any]) -> None:
    m, k = 300032, 7168  # 299593 * k is the first element beyond
    if torch.cuda.mem_get_info()[0] < 12 * m * k // 2:
        pytest.skip(f"needs {6 * m * k / 1e9:.0f} GB of free GPU memory")
    x = torch.empty(m, k, dtype=torch.bfloat16, device="cuda").normal_()
    q, sf = cast(x, use_ue8m0=False)
    rows_per_scale = 1 if cast is per_token_cast_to_fp8 else 128
    for begin in (0, 128 * 2340, m - 128):
        rows = slice(begin, begin + 128)
        expected_q, expected_sf = cast(x[rows].cpu(), use_ue8m0=False)
        scales = sf[begin // rows_per_scale : (begin + 128) // rows_per_scale]
        assert_bitwise_equal(scales.cpu(), expected_sf, "sf")
        assert_bitwise_equal(q[rows].cpu(), expected_q, "q")
    del q, sf
    q, sf = cast(x.view(2, -1)[:, : k * 128], use_ue8m0=False)  # a row stride beyond 2**30
    expected_q, expected_sf = cast(x.view(2, -1)[:, : k * 128].cpu(), use_ue8m0=False)
    assert_bitwise_equal(sf.cpu(), expected_sf, "sf")
    assert_bitwise_equal(q.cpu(), expected_q, "q")


@casts
def test_reference_backend_has_the_same_bits(
    cast: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(130, 272, device="cuda", dtype=torch.bfloat16)
    expected = cast(x, use_ue8m0=False)
    settings.backend = "reference"
    monkeypatch.setattr(launch, "run", None)
    again = cast(x, use_ue8m0=False)
    for tensor, other in zip(expected, again, strict=True):
        assert_bitwise_equal(tensor, other)


@casts
def test_runs_on_the_current_stream_and_in_a_graph(cast: Callable[..., Any]) -> None:
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    expected = cast(x, use_ue8m0=False)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            delayed = x + 0
            other = cast(delayed, use_ue8m0=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cast(x, use_ue8m0=False)
    for tensor in captured:
        tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int32).fill_(0)
    graph.replay()
    for tensor, first, second in zip(expected, other, captured, strict=True):
        assert_bitwise_equal(first, tensor)
        assert_bitwise_equal(second, tensor)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@casts
def test_c056_the_tensors_device_decides(cast: Callable[..., Any]) -> None:
    for index in (1, 0, 1):
        check(cast, torch.randn(70, 272, device=f"cuda:{index}"), use_ue8m0=False)


# The transposing kernel


@pytest.mark.parametrize("groups", [None, 1, 2, 3])
@pytest.mark.parametrize("mn", [*range(1, 10), 63, 64, 65, 4100])
def test_scales_become_native(groups: int | None, mn: int) -> None:
    for num_k_blocks in (1, 2, 3, 31, 32, 33, 56):
        shape = (mn, num_k_blocks) if groups is None else (groups, mn, num_k_blocks)
        sf = torch.rand(shape, device="cuda")
        wide = torch.nn.functional.pad(sf, (1, 2), value=math.nan)[..., 1:-2]
        for scales in (sf, sf.mT.contiguous().mT, wide, sf[..., :1].expand(shape)):
            native = get_mn_major_tma_aligned_tensor(scales)
            assert_bitwise_equal(native, scales)
            assert get_mn_major_tma_aligned_tensor(native) is native
            assert num_k_blocks == 1 or native.stride(-1) == -(-mn // 4) * 4
            if groups is None:
                assert native_sfa(native, mn, 128 * num_k_blocks) is native


def test_many_scales() -> None:
    sf = torch.rand(3_000_000, 57, device="cuda")
    assert torch.equal(get_mn_major_tma_aligned_tensor(sf), sf)
