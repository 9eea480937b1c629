"""Failures of grouped GEMMs that users reported in public, as tests: tests/data/cases.jsonl.

`test_cNNN_...` holds for the case of that id. Where it can, a case runs on the CPU and on a GPU.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from dense_tools import GuardedOutput
from grouped_tools import (
    CONTIGUOUS,
    GROUPED_CONFIGS,
    KINDS,
    POISON,
    GroupedCase,
    check,
    make_case,
    planned,
    random_sizes,
    random_values,
    run,
    with_config,
)

from deep_gemm import jit
from deep_gemm.testing import assert_bitwise_equal


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def is_untouched(d: torch.Tensor) -> bool:
    return bool((d.view(torch.int16) == POISON).all())


# -1 and padding


@pytest.mark.parametrize("kind", KINDS)
def test_c010_a_random_walk_over_group_sizes(kind: str, device: str) -> None:
    """`gpu/test_grouped_stress_gpu.py` goes ten thousand steps of this walk."""
    rng = random.Random(0)
    case = GroupedCase(kind, 9, 130 if kind == "masked" else 900, 24, 48, device=device)
    for _ in range(20 if device == "cpu" else 100):
        check(case.route(random_values(kind, rng, 9, case.rows, case.alignment)))


def test_c011_mixed_blocks_and_a_long_dead_tail(device: str) -> None:
    rng = random.Random(0)
    mean, tail = (100, 1024) if device == "cpu" else (1000, 10 * 1024)
    ids = []
    for group in range(4):
        size = int(mean * rng.uniform(0.7, 1.3))
        ids += [group] * size + [-1] * (-size % 128)
    ids += [-1] * tail
    case = GroupedCase("ids", 4, len(ids), 136, 272, device=device).route(ids)
    assert is_untouched(check(case)[-tail:])
    tails_carry_the_group = [
        max(ids[row // 128 * 128 : row // 128 * 128 + 128]) for row in range(len(ids))
    ]
    d = check(case)
    both = check(case.route(tails_carry_the_group))
    rows = torch.tensor(ids, device=device) >= 0
    assert_bitwise_equal(d[rows], both[rows])


def test_c012_a_block_of_nothing_reads_no_weight(device: str) -> None:
    case = make_case("ids", [128, 128], 136, 272, wild=False, device=device)
    weights, scales = case.b
    before = torch.full_like(weights.view(torch.uint8), 0x7F)  # what group -1 would be
    all_weights = torch.cat([before, weights.view(torch.uint8)]).view(weights.dtype)
    all_scales = torch.cat([torch.full_like(scales, float("nan")), scales])
    case.b = all_weights[2:], all_scales[2:]
    case.route([-1] * 128 + [1] * 128)
    assert is_untouched(check(case)[:128])
    case.route([0] * 128 + [-1] * 128)
    assert is_untouched(check(case)[128:])


def test_c013_groups_that_are_left_out(device: str) -> None:
    case = make_case("ids", [100, 300, 20, 128, 1], 136, 272, wild=False, device=device)
    d = check(case)
    kept = [-1 if group in (1, 4) else group for group in case.layout.tolist()]
    without = check(case.route(kept))
    rows = case.is_computed
    assert_bitwise_equal(without[rows], d[rows])
    assert is_untouched(without[128:512])


@pytest.mark.gpu
def test_c014_a_graph_with_a_dead_tail() -> None:
    case = make_case("ids", [100, 300], 136, 272, wild=False)
    case = GroupedCase("ids", 2, 2048, 136, 272).route(case.layout.tolist() + [-1] * 1536)
    output = GuardedOutput(case.num_rows, case.n)
    planned(case, output.d)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned(case, output.d)
    output.d.view(torch.int16).fill_(POISON)
    graph.replay()
    output.check_guard()
    case.check_rows(output.d)


@pytest.mark.parametrize("m_max", [1, 2, 4, 8, 16, 31, 32, 33, 63, 64, 65])
def test_c015_no_store_reaches_the_next_group(m_max: int, device: str) -> None:
    counts = [m_max, 0, m_max - 1, 0, m_max]
    check(make_case("masked", counts, 136, 272, rows=m_max, device=device))


@pytest.mark.parametrize("m", [8, 16, 64])
def test_c016_few_rows_per_group(m: int, device: str) -> None:
    check(make_case("masked", [m] * 4, 512, 512, rows=m, device=device))
    check(make_case("masked", [1] * 4, 512, 512, rows=m, device=device))


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_c020_stale_padding_does_not_reach_valid_rows(kind: str, device: str) -> None:
    case = make_case(kind, [5, 0, 33, 64, 1], 264, 528, alignment=32, device=device)
    expected = check(case)
    for byte, scale in ((0x7F, 1.0), (0xFF, float("nan")), (0x7E, float("inf")), (0x3A, -1e30)):
        assert_bitwise_equal(check(case.poison(byte, scale)), expected)


# Sizes


@pytest.mark.parametrize("m", [7, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_c035_groups_of_seven_and_nine_rows(kind: str, m: int, device: str) -> None:
    check(make_case(kind, [m, 0, m, m], 264, 272, device=device))
    if kind == "psum":  # the caller's own offsets, no row of padding
        check(make_case(kind, [m, 0, m, m], 264, 272, alignment=1, rows=3 * m, device=device))


@pytest.mark.parametrize("m_max", [1, 2, 3, 5, 6, 7, 9, 131])
def test_c037_rows_per_group_that_are_no_multiple_of_4(m_max: int, device: str) -> None:
    case = make_case("masked", [m_max, 1, m_max], 136, 272, rows=m_max, device=device)
    expected = check(case)
    case.a = case.a[0], case.a[1].contiguous()  # 12-byte rows of scales
    assert_bitwise_equal(check(case), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_c039_experts_of_192(kind: str, device: str) -> None:
    check(make_case(kind, [100, 0, 30], 192, 256, device=device))
    check(make_case(kind, [100, 0, 30], 256, 192, device=device))
    case = make_case(kind, [100, 0, 30], 192, 256, device=device)
    weights, scales = case.b
    case.b = weights, scales[:, :1]  # of a shard that starts inside a block
    d = torch.empty(case.num_rows, 192, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"sfb has shape \(3, 1, 2\), expected \(3, 2, 2\)"):
        planned(case, case.shaped(d))


# Nothing to do


def test_c045_no_rows(device: str) -> None:
    for kind in KINDS:
        case = GroupedCase(kind, 3, 0, 136, 272, device=device)
        check(case.route([] if kind == "ids" else [0, 0, 0]))


@pytest.mark.gpu
def test_c045_no_rows_inside_a_graph() -> None:
    case = GroupedCase("ids", 3, 0, 136, 272).route([])
    some = make_case("ids", [100, 30], 136, 272)
    expected, d = run(some), torch.empty(0, 136, dtype=torch.bfloat16, device="cuda")
    output = GuardedOutput(some.num_rows, some.n)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned(case, d)
        planned(some, output.d)
    graph.replay()
    assert_bitwise_equal(output.d, expected)


@pytest.mark.parametrize("expected_m", [0, 40])
def test_c046_a_hint_of_nothing(expected_m: int, device: str) -> None:
    case = make_case("masked", [0, 0, 0], 136, 272, rows=40, device=device)
    assert is_untouched(run(case, lambda case, d: case.call(d, expected_m=expected_m)))
    case.route([3, 0, 40])
    check(case, lambda case, d, _: case.call(d, expected_m=expected_m))


def test_c047_most_experts_are_empty(device: str) -> None:
    n, k = (24, 144) if device == "cpu" else (1024, 1024)
    counts = [0] * 256
    counts[3], counts[200], counts[255] = 64, 1, 7
    d = check(make_case("masked", counts, n, k, rows=64, device=device))
    assert is_untouched(d[: 3 * 64]) and is_untouched(d[4 * 64 : 200 * 64])


@pytest.mark.parametrize("kind", KINDS)
def test_c050_all_groups_are_empty(kind: str, device: str) -> None:
    case = GroupedCase(kind, 5, 256, 136, 272, device=device)
    assert is_untouched(check(case.route([-1] * 256 if kind == "ids" else [0] * 5)))


# Arguments


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_c055_a_layout_on_the_cpu_is_refused_by_name(kind: str) -> None:
    case = make_case(kind, [100, 30], 136, 272)
    on_gpu = case.layout
    run(case)
    name = "masked_m" if kind == "masked" else "grouped_layout"
    case.layout = on_gpu.cpu()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{name} is on cpu, expected cuda:0"):
            run(case)
    case.layout = on_gpu.long()
    with pytest.raises(TypeError, match=f"{name} has dtype torch.int64, expected torch.int32"):
        run(case)
    case.layout = on_gpu
    run(case)


def test_c072_no_number_of_groups_or_rows_is_compiled_in() -> None:
    for config in GROUPED_CONFIGS:
        names = set(config.constants())
        assert not {name for name in names if "GROUPS" in name or "SHAPE" in name}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_c072_another_number_of_groups_compiles_nothing(kind: str) -> None:
    gemm, names = with_config(GROUPED_CONFIGS[0]), ("disk_hits", "compiled")
    run(make_case(kind, [100], 136, 272), gemm)
    before = jit.counters()
    for sizes in ([100, 30], [1] * 7, [130] * 33):
        check(make_case(kind, sizes, 264, 400), gemm)
    assert [jit.counters()[name] for name in names] == [before[name] for name in names]


# Graphs


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_c100_rows_for_the_worst_case(kind: str, device: str) -> None:
    """Only the rows in use count; `test_grouped_gpu.py` does the same inside a graph."""
    rows = 4096 if device == "cpu" else 65536
    case = GroupedCase(kind, 8, rows, 24, 48, device=device)
    values = random_values(kind, random.Random(0), 8, 512, case.alignment)
    if kind == "ids":
        values += [-1] * (rows - 512)
    assert is_untouched(check(case.route(values))[512:])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_c101_a_graph_is_replayed_with_another_distribution(kind: str) -> None:
    rng = random.Random(0)
    case = GroupedCase(kind, 5, 150 if kind == "masked" else 700, 136, 272)
    batch_a, batch_b = (random_values(kind, rng, 5, case.rows, 128) for _ in range(2))
    output = GuardedOutput(case.num_rows, case.n)
    d = case.shaped(output.d)
    planned(case.route(batch_a), d)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned(case, d)
    for batch in (batch_b, batch_a, batch_b):
        case.route(batch)
        output.d.view(torch.int16).fill_(POISON)
        graph.replay()
        output.check_guard()
        case.check_rows(output.d)


# Reported for speed: here, that the results are right


def test_c110_32_rows_per_expert(device: str) -> None:
    groups, n, k = (4, 256, 512) if device == "cpu" else (16, 4096, 7168)
    check(make_case("masked", [32] * groups, n, k, rows=32, device=device))


@pytest.mark.parametrize("alignment", [1, 8, 16, 32, 64])
def test_c111_groups_without_128_rows_of_padding(alignment: int, device: str) -> None:
    sizes = [33, 1, 0, 70, 128, 7]
    case = make_case("psum", sizes, 136, 272, alignment=alignment, device=device)
    check(case)
    if alignment == 1:
        assert case.layout.tolist()[-1] == sum(sizes)
    if alignment % 16 == 0:
        check(make_case("ids", sizes, 136, 272, alignment=alignment, device=device))


def test_c112_no_result_depends_on_the_hint(device: str) -> None:
    case = make_case("masked", [33, 0, 100, 7], 264, 528, rows=128, device=device)
    expected = check(case)
    for expected_m in (0, 1, 35, 128, 10**9):
        d = run(case, lambda case, d, hint=expected_m: case.call(d, expected_m=hint))
        assert_bitwise_equal(d, expected)


def test_c118_prefix_sums_give_what_the_masked_layout_gives(device: str) -> None:
    """Without its buffer of G * m_max rows."""
    counts = [33, 0, 100, 7, 1]
    masked = make_case("masked", counts, 264, 528, rows=100, fill="integers", device=device)
    d = check(masked)
    psum = make_case(
        "psum", counts, 264, 528, alignment=1, rows=sum(counts), fill="integers", device=device
    )
    psum.a, psum.b = masked.rows_of_a(masked.is_computed), masked.b
    assert_bitwise_equal(run(psum), d[masked.is_computed])


@pytest.mark.parametrize("num_groups", [1, 2, 3, 4])
def test_c121_few_local_experts_with_much_room(num_groups: int, device: str) -> None:
    rows = 1000 if device == "cpu" else 20_000
    options: dict[str, Any] = {"rows": rows, "device": device}
    for counts in ([0] * num_groups, [1] * num_groups, [0] * (num_groups - 1) + [1]):
        check(make_case("masked", counts, 136, 272, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_c122_chunks_of_32768_rows(kind: str) -> None:
    rng = random.Random(0)
    case = GroupedCase(kind, 16, 32768, 512, 256)
    for _ in range(5):
        check(case.route(random_values(kind, rng, 16, case.rows, case.alignment)))


@pytest.mark.parametrize("kind", KINDS)
def test_c122_random_sizes(kind: str, device: str) -> None:
    rng = random.Random(1)
    check(make_case(kind, random_sizes(rng, 16, 90), 136, 272, device=device))
