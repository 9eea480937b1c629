"""The routing kernel on a GPU: what PyTorch operations give, whatever the choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_grouped_layout import check, guarded_outputs, is_equal

from deep_gemm import launch
from deep_gemm.config import settings
from deep_gemm.grouped_gemm import m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked
from deep_gemm.grouped_layout import MAX_EXPERTS, GroupedLayout, build_grouped_layout
from deep_gemm.quantize import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu

OPTIONS: list[dict[str, Any]] = [
    {"layout": "psum"},
    {"layout": "psum", "alignment": 1},
    {"layout": "psum", "alignment": 16, "num_rows": 333},
    {"layout": "contiguous"},
    {"layout": "contiguous", "alignment": 16, "num_rows": 1000},
    {"layout": "masked"},
    {"layout": "masked", "m_max": 7},
    {"layout": "masked", "m_max": 0},
]
every_layout = pytest.mark.parametrize("options", OPTIONS, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
SHAPES = [(0, 8), (1, 1), (1, 8), (31, 1), (33, 3), (128, 8), (1000, 6), (4096, 8)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def random_ids(kind: str, tokens: int, topk: int, num_experts: int, dtype: torch.dtype) -> Any:
    shape = (tokens, topk)
    if kind == "one":
        return torch.full(shape, num_experts - 1, dtype=dtype, device="cuda")
    if kind == "skewed":
        ids = (torch.rand(shape, device="cuda") ** 4 * num_experts).to(dtype)
        return ids.clamp(max=num_experts - 1)
    if kind == "wild":
        limits = torch.iinfo(dtype)
        wild = torch.randint(limits.min, limits.max, shape, dtype=dtype, device="cuda")
        usual = torch.randint(-1, num_experts + 1, shape, dtype=dtype, device="cuda")
        return usual.where(torch.rand(shape, device="cuda") < 0.7, wild)
    return torch.randint(num_experts, shape, dtype=dtype, device="cuda")


def operations(ids: torch.Tensor, num_experts: int, **options: Any) -> GroupedLayout:
    """The same on the CPU."""
    return build_grouped_layout(ids.cpu(), num_experts, **options)


def on_cpu(built: GroupedLayout) -> GroupedLayout:
    tensors = (built.grouped_layout, built.row_of_slot, built.slot_of_row)
    assert all(t.is_cuda and t.is_contiguous() and t.dtype == torch.int32 for t in tensors)
    return GroupedLayout(*(t.cpu() for t in tensors), *fields(built))


def fields(built: GroupedLayout) -> tuple[Any, ...]:
    return built.num_rows, built.layout, built.alignment


def build_guarded(ids: torch.Tensor, num_experts: int, **options: Any) -> GroupedLayout:
    with pytest.MonkeyPatch.context() as patch, guarded_outputs(patch):
        return build_grouped_layout(ids, num_experts, **options)


@every_layout
@dtypes
@pytest.mark.parametrize("kind", ["uniform", "one", "skewed", "wild"])
def test_result_of_the_cpu(options: dict[str, Any], dtype: torch.dtype, kind: str) -> None:
    for tokens, topk in SHAPES:
        for num_experts in (1, 8, 256, 384):
            ids = random_ids(kind, tokens, topk, num_experts, dtype)
            built = build_guarded(ids, num_experts, **options)
            expected = operations(ids, num_experts, **options)
            assert fields(built) == fields(expected)
            assert is_equal(on_cpu(built), expected), (tokens, topk, num_experts)


@every_layout
def test_the_rules_one_by_one(options: dict[str, Any]) -> None:
    for num_experts in (3, 40):
        ids = random_ids("wild", 57, 4, num_experts, torch.int64)
        check(on_cpu(build_guarded(ids, num_experts, **options)), ids.cpu(), num_experts)


@pytest.mark.parametrize("num_experts", [511, 512, 513, MAX_EXPERTS])
@pytest.mark.parametrize("layout", ["psum", "contiguous", "masked"])
def test_many_experts(num_experts: int, layout: Any) -> None:
    options = {"m_max": 9} if layout == "masked" else {}
    for kind in ("uniform", "skewed", "wild"):
        ids = random_ids(kind, 3000, 8, num_experts, torch.int32)
        built = build_guarded(ids, num_experts, layout=layout, **options)
        expected = operations(ids, num_experts, layout=layout, **options)
        assert is_equal(on_cpu(built), expected)


@dtypes
def test_many_slots(dtype: torch.dtype) -> None:
    ids = random_ids("skewed", 1_000_003, 8, 256, dtype)
    for layout in ("psum", "contiguous"):
        built = on_cpu(build_guarded(ids, 256, layout=layout))
        assert is_equal(built, operations(ids, 256, layout=layout))


def test_rows_up_to_2_to_the_31() -> None:
    if torch.cuda.mem_get_info()[0] < 12 * 2**31:
        pytest.skip("needs 26 GB of free GPU memory")
    m_max = (2**31 - 1) // 256
    ids = random_ids("uniform", 1000, 8, 256, torch.int32)
    built = build_grouped_layout(ids, 256, "masked", m_max=m_max)
    expected = operations(ids, 256, layout="masked", m_max=1000)
    assert torch.equal(built.grouped_layout.cpu(), expected.grouped_layout)
    expert, position = expected.row_of_slot // 1000, expected.row_of_slot % 1000
    rows = (expert * m_max + position).cuda()
    assert torch.equal(built.row_of_slot, rows)
    slots = torch.arange(8000, dtype=torch.int32, device="cuda")
    assert torch.equal(built.slot_of_row[rows.flatten().long()], slots)
    built.slot_of_row[rows.flatten().long()] = -1
    assert built.slot_of_row.amax() == built.slot_of_row.amin() == -1


@every_layout
def test_repeats_and_sm_counts_change_nothing(options: dict[str, Any]) -> None:
    ids = random_ids("skewed", 2048, 8, 256, torch.int64)
    expected = build_grouped_layout(ids, 256, **options)
    for num_sms in (0, 1, 7, 100, 0):
        settings.num_sms = num_sms
        for _ in range(10):
            assert is_equal(build_grouped_layout(ids, 256, **options), expected)


@every_layout
def test_reference_backend(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = random_ids("wild", 500, 8, 64, torch.int32)
    expected = build_grouped_layout(ids, 64, **options)
    settings.backend = "reference"
    monkeypatch.setattr(launch, "run", None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        built = build_grouped_layout(ids, 64, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert is_equal(built, expected)


@every_layout
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_graphs_and_streams(options: dict[str, Any], backend: Any) -> None:
    """One graph routes whatever the ids are when it is replayed, there and back."""
    settings.backend = backend
    x = torch.randn(200, 256, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(200, 8, device="cuda")
    ids = random_ids("uniform", 200, 8, 64, torch.int64)

    def route() -> tuple[GroupedLayout, torch.Tensor, torch.Tensor]:
        built = build_grouped_layout(ids, 64, **options)
        rows = built.gather(x)
        return built, rows, built.scatter(rows, weights)

    route()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            streamed = route()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = route()
    for kind in (None, "one", "wild", "skewed"):
        if kind is not None:
            ids.copy_(random_ids(kind, 200, 8, 64, torch.int64))
        graph.replay()
        expected = streamed if kind is None else route()
        assert is_equal(captured[0], expected[0])
        assert_bitwise_equal(captured[1], expected[1], "rows")
        assert_bitwise_equal(captured[2], expected[2], "sums")


def test_one_launch() -> None:
    ids = random_ids("uniform", 64, 8, 32, torch.int32)
    build_grouped_layout(ids, 32)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        build_grouped_layout(ids, 32)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
    if not kernels:
        pytest.skip("the profiler sees no kernels here")
    assert kernels == ["group_rows"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_device_decides() -> None:
    for index in (1, 0, 1):
        ids = random_ids("uniform", 64, 8, 32, torch.int32).to(f"cuda:{index}")
        assert is_equal(on_cpu(build_grouped_layout(ids, 32)), operations(ids, 32))


def test_experts_of_a_layer_in_every_layout() -> None:
    """Routed through any layout, tokens get the same bits."""
    num_experts, tokens = 16, 300
    ids = torch.rand(tokens, num_experts, device="cuda").topk(4).indices
    ids.masked_fill_(torch.rand(ids.shape, device="cuda") < 0.1, -1)
    q, sf = per_token_cast_to_fp8(torch.randn(tokens, 512, device="cuda"))
    pairs = [per_block_cast_to_fp8(torch.randn(256, 512, device="cuda")) for _ in range(16)]
    b = (torch.stack([w for w, _ in pairs]), torch.stack([s for _, s in pairs]))
    weights = torch.rand(tokens, 4, device="cuda")
    results = []
    for layout, alignment in (("psum", 1), ("psum", 128), ("contiguous", 16), ("masked", None)):
        options = {} if alignment is None else {"alignment": alignment}
        built = build_grouped_layout(ids, num_experts, layout, **options)  # type: ignore[arg-type]
        a = (built.gather(q), built.gather(sf))
        d = torch.full((*built.rows_shape, 256), torch.nan, device="cuda", dtype=torch.bfloat16)
        if layout == "masked":
            m_grouped_fp8_gemm_nt_masked(a, b, d, built.grouped_layout, 80)
        else:
            settings.mk_alignment = built.alignment
            use_psum = layout == "psum"
            m_grouped_fp8_gemm_nt_contiguous(
                a, b, d, built.grouped_layout, use_psum_layout=use_psum
            )
        results.append(built.scatter(d, weights))
    assert results[0].isfinite().all() and results[0].any()
    for result in results[1:]:
        assert_bitwise_equal(result, results[0])
