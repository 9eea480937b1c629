"""The grouped kernels against the specification: every config, layout and edge, to the bit."""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch
from dense_tools import GuardedOutput, config_id
from grouped_tools import (
    ALIGNMENTS,
    CONTIGUOUS,
    GROUPED_CONFIGS,
    KINDS,
    POISON,
    GroupedCase,
    check,
    compile_all,
    make_case,
    planned,
    random_sizes,
    random_values,
    run,
    with_config,
)
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm.testing import assert_bitwise_equal
from deep_gemm.types import KernelConfig

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_grouped")]

FILLS = ["normal", "exponents", "zeros", "outliers", "tiny", "integers"]
LAYOUTS = [(kind, alignment) for kind in KINDS for alignment in ALIGNMENTS[kind]]
M_MAX = [1, 2, 4, 8, 16, 31, 32, 33, 63, 64, 65]

# What every config has to get right: kind, alignment, sizes of groups, n, k, fill.
CASES = [
    ("ids", 128, (100, 0, 1, 300, 130), 264, 528, "normal"),  # an odd number of tiles per cluster
    ("ids", 128, (257, 3, 128, 0, 65), 520, 272, "exponents"),
    ("ids", 16, (17, 0, 64, 5, 200, 3, 16), 136, 1040, "normal"),
    ("ids", 64, (1, 64, 63, 65, 129), 8, 16, "normal"),  # less than one of everything
    ("psum", 128, (100, 0, 1, 300, 130), 264, 528, "normal"),
    ("psum", 8, (3, 0, 1, 129, 70, 8), 392, 144, "exponents"),
    ("psum", 1, (5, 0, 1, 193, 64, 67), 264, 400, "normal"),
    ("psum", 128, (0, 513, 0), 1304, 400, "normal"),  # several tiles for each CTA
    ("masked", 128, (65, 0, 1, 130, 7), 264, 528, "normal"),
    ("masked", 128, (3, 0, 1, 2, 3), 520, 1040, "exponents"),
    ("masked", 128, (257, 256, 0, 255, 193), 136, 144, "normal"),
]


@pytest.fixture(scope="module")
def compiled_grouped() -> None:
    compile_all()


@pytest.fixture(params=GROUPED_CONFIGS, ids=config_id)
def config(request: pytest.FixtureRequest) -> KernelConfig:
    return request.param


@functools.cache
def case_and_bits(index: int) -> tuple[GroupedCase, torch.Tensor]:
    """A case of `CASES`, and D by the planned call, checked."""
    kind, alignment, sizes, n, k, fill = CASES[index]
    case = make_case(kind, sizes, n, k, alignment=alignment, fill=fill, seed=index)
    return case, check(case)


@functools.cache
def many_groups(kind: str, num_groups: int) -> tuple[GroupedCase, torch.Tensor]:
    rng = random.Random(num_groups)
    alignment = {"ids": 16, "psum": 1, "masked": 128}[kind]
    sizes = random_sizes(rng, num_groups, 20, 16)
    case = make_case(kind, sizes, 136, 272, alignment=alignment)
    return case, check(case)


def new_output(case: GroupedCase) -> tuple[GuardedOutput, torch.Tensor]:
    output = GuardedOutput(case.num_rows, case.n)
    return output, case.shaped(output.d)


# Configs


def test_every_config_is_right_and_gives_the_same_bits(config: KernelConfig) -> None:
    for index in range(len(CASES)):
        case, expected = case_and_bits(index)
        assert_bitwise_equal(check(case, with_config(config)), expected, f"{config}, {case}")
        if case.kind != "masked":
            check(case, with_config(config), ensure_zero_padding=False)


def test_every_config_is_exact_where_no_sum_is_rounded(config: KernelConfig) -> None:
    for kind, alignment in LAYOUTS:
        case = exact_case(kind, alignment)
        d = check(case, with_config(config))
        assert_bitwise_equal(d[case.is_computed], case.oracle().bfloat16(), f"{config}, {case}")


@functools.cache
def exact_case(kind: str, alignment: int) -> GroupedCase:
    sizes = [alignment + 1, 0, 1, alignment, 77, 3]
    return make_case(kind, sizes, 200, 272, alignment=alignment, fill="integers", seed=3)


@pytest.mark.parametrize("num_sms", [2, 7])
def test_every_config_with_many_tiles_per_cta(config: KernelConfig, num_sms: int) -> None:
    deep_gemm.set_num_sms(num_sms)
    for index, kind in ((0, "ids"), (7, "psum"), (8, "masked")):
        case, expected = case_and_bits(index)
        assert case.kind == kind
        assert_bitwise_equal(check(case, with_config(config)), expected, f"{config}, {case}")


def test_every_config_with_many_groups(config: KernelConfig) -> None:
    for kind in KINDS:
        case, expected = many_groups(kind, 300)
        assert_bitwise_equal(run(case, with_config(config)), expected, f"{config}, {case}")


def test_every_config_with_few_rows_per_group(config: KernelConfig) -> None:
    for m_max in M_MAX:
        case, expected = few_rows(m_max)
        output, d = new_output(case)
        with_config(config)(case, d, True)
        output.check_guard()
        assert_bitwise_equal(output.d, expected, f"{config}, m_max={m_max}")


@functools.cache
def few_rows(m_max: int) -> tuple[GroupedCase, torch.Tensor]:
    counts = [m_max, 0, m_max, 1, max(0, m_max - 1), m_max]
    case = make_case("masked", counts, 136, 144, rows=m_max)
    return case, check(case)


# Layouts


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("kind, alignment", LAYOUTS)
def test_every_layout(kind: str, alignment: int, fill: str) -> None:
    rng = random.Random(alignment)
    for seed in range(2):
        sizes = random_sizes(rng, rng.choice([1, 2, 5, 9]), 400, alignment)
        options = {"alignment": alignment, "fill": fill, "seed": seed}
        case = make_case(kind, sizes, 264, 400, **options)
        check(case)
        if kind != "masked":
            check(case, ensure_zero_padding=False)


@pytest.mark.parametrize("kind, alignment", LAYOUTS)
def test_a_group_has_the_bits_of_the_dense_gemm(kind: str, alignment: int) -> None:
    for sizes, n, k in (((100, 0, 1, 300, 17), 264, 528), ((1000, 65), 2112, 1040)):
        case = make_case(kind, sizes, n, k, alignment=alignment)
        d = check(case)
        for group, rows in case.group_rows.items():
            dense = torch.full((len(rows), n), math.nan, dtype=torch.bfloat16, device="cuda")
            deep_gemm.fp8_gemm_nt(*case.operands_of(group), dense)
            assert_bitwise_equal(d[rows], dense, f"group {group} of {case}")


@pytest.mark.parametrize("num_groups", [1, 3, 4])
@pytest.mark.parametrize("m_max", M_MAX)
def test_masked_with_any_number_of_rows_per_group(m_max: int, num_groups: int) -> None:
    rng = random.Random(m_max)
    for counts in ([m_max] * num_groups, random_sizes(rng, num_groups, m_max)):
        check(make_case("masked", counts, 264, 272, rows=m_max))


@pytest.mark.parametrize("num_groups", [256, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_many_groups(kind: str, num_groups: int) -> None:
    case, _ = many_groups(kind, num_groups)
    assert len(case.group_rows) > num_groups // 2
    sizes = [0] * num_groups
    sizes[num_groups // 2 + 3] = 70 if kind == "masked" else 700  # one group has all rows
    check(make_case(kind, sizes, 136, 272, alignment=case.alignment))


@pytest.mark.parametrize("kind", KINDS)
def test_no_group_has_a_row(kind: str) -> None:
    case = GroupedCase(kind, 5, 384, 264, 272)
    d = check(case.route([-1] * 384 if kind == "ids" else [0] * 5))
    assert bool((d.view(torch.int16) == POISON).all())


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_alignments_larger_than_all_rows(kind: str) -> None:
    for alignment in (1024, 2**20, 2**30, 2**40):
        case = GroupedCase(kind, 2, 600, 264, 272, alignment=alignment)
        check(case.route([-1] * 200 + [1] * 300 + [-1] * 100 if kind == "ids" else [500, 500]))


@pytest.mark.parametrize("kind", KINDS)
def test_large(kind: str) -> None:
    rng = random.Random(0)
    case = make_case(kind, [rng.randint(700, 1300) for _ in range(8)], 2048, 1024)
    check(case)


@hypothesis_settings(max_examples=80, derandomize=True, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    sizes=st.lists(
        st.one_of(st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129]), st.integers(0, 400)),
        min_size=1,
        max_size=9,
    ),
    n=st.integers(1, 80).map(lambda x: 8 * x),
    k=st.integers(1, 80).map(lambda x: 16 * x),
    fill=st.sampled_from(FILLS),
    seed=st.integers(0, 1000),
    ensure_zero_padding=st.booleans(),
    config=st.sampled_from([None, *GROUPED_CONFIGS]),
)
def test_any_layout(
    layout: tuple[str, int],
    sizes: list[int],
    n: int,
    k: int,
    fill: str,
    seed: int,
    ensure_zero_padding: bool,
    config: KernelConfig | None,
) -> None:
    kind, alignment = layout
    case = make_case(kind, sizes, n, k, alignment=alignment, fill=fill, seed=seed)
    gemm = with_config(config) if config else planned
    check(case, gemm, ensure_zero_padding)


# A row depends on nothing but itself


@pytest.mark.parametrize("byte, scale", [(0x7F, math.nan), (0x7E, math.inf), (0xFE, 1e38), (0, 0)])
@pytest.mark.parametrize("kind, alignment", LAYOUTS)
def test_padding_has_no_effect(kind: str, alignment: int, byte: int, scale: float) -> None:
    case = make_case(kind, [100, 0, 1, 300, 17], 264, 528, alignment=alignment)
    expected = check(case)
    assert_bitwise_equal(check(case.poison(byte, scale)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_have_no_effect(kind: str) -> None:
    case = make_case(kind, [100, 2, 300, 40], 264, 528)
    expected = run(case)
    for group, rows in case.group_rows.items():
        kept = torch.zeros(case.num_rows, dtype=torch.bool, device="cuda")
        kept[rows[::3]] = True
        others = ~kept.view(case.a[0].shape[:-1])[..., None]
        case.poison()
        case.a[0].view(torch.uint8).masked_fill_(others, 0x7F)
        case.a[1].masked_fill_(others, math.nan)
        assert_bitwise_equal(run(case)[kept], expected[kept], f"group {group}")


@pytest.mark.parametrize("kind, alignment", LAYOUTS)
def test_a_hundred_runs_give_the_same_bits(kind: str, alignment: int) -> None:
    case = make_case(kind, [100, 0, 1, 700, 17, 333], 520, 1040, alignment=alignment)
    expected = check(case)
    outputs = torch.full((100, *expected.shape), POISON, dtype=torch.int16, device="cuda")
    for d in outputs.view(torch.bfloat16):
        planned(case, case.shaped(d))
    assert bool((outputs == expected.view(torch.int16)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_of_scales_gives_the_same_bits(kind: str) -> None:
    case = make_case(kind, [33, 0, 130, 1], 264, 528)
    expected = check(case)
    (a, sfa), (b, sfb) = case.a, case.b
    for other in (sfa.contiguous(), torch.nn.functional.pad(sfa, (1, 3))[..., 1:-3]):
        case.a = a, other
        assert_bitwise_equal(check(case), expected)
    case.a, case.b = (a, sfa), (b, sfb.mT.contiguous().mT)
    assert_bitwise_equal(check(case), expected)


@pytest.mark.parametrize("expected_m", [0, 1, 8, 64, 1000, 10**6])
def test_hints_have_no_effect(expected_m: int) -> None:
    hints = {"masked": "expected_m", "psum": "expected_m_for_psum_layout"}
    for index, kind in ((4, "psum"), (8, "masked")):
        case, expected = case_and_bits(index)
        output, d = new_output(case)
        case.call(d, **{hints[kind]: expected_m})
        assert_bitwise_equal(output.d, expected)


@pytest.mark.parametrize("num_sms", [1, 2, 7, 66])
def test_few_sms(num_sms: int) -> None:
    deep_gemm.set_num_sms(num_sms)
    for index in range(len(CASES)):
        case, expected = case_and_bits(index)
        assert_bitwise_equal(check(case), expected, f"{case}")


def test_dependent_launches_give_the_same_bits() -> None:
    deep_gemm.set_pdl(True)
    for index in range(len(CASES)):
        case, expected = case_and_bits(index)
        for _ in range(3):
            assert_bitwise_equal(run(case), expected, f"{case}")


# Streams and graphs


def routings(kind: str, num_groups: int, rows: int, alignment: int) -> list[list[int]]:
    """Contents of a layout, among them those without a row, and those with all in one group."""
    rng = random.Random(rows)
    some = [random_values(kind, rng, num_groups, rows, alignment) for _ in range(5)]
    if kind == "ids":
        return [*some, [-1] * rows, [num_groups - 1] * rows]
    return [*some, [0] * num_groups, [rows] * num_groups]


@pytest.mark.parametrize("row_major", [False, True], ids=["native", "row-major"])
@pytest.mark.parametrize("kind, alignment", LAYOUTS)
def test_a_graph_replays_with_another_routing(kind: str, alignment: int, row_major: bool) -> None:
    case = GroupedCase(kind, 7, 200 if kind == "masked" else 1000, 264, 528, alignment=alignment)
    if row_major:
        case.a = case.a[0], case.a[1].contiguous()
    output, d = new_output(case)
    first, *others = routings(kind, case.num_groups, case.rows, alignment)
    case.route(first)
    planned(case, d)  # compiles what the graph needs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned(case, d)
    for values in (*others, first):
        case.route(values)
        output.d.view(torch.int16).fill_(POISON)
        graph.replay()
        output.check_guard()
        case.check_rows(output.d)
        assert_bitwise_equal(output.d, run(case))


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_a_graph_for_the_worst_case_has_a_dead_tail(kind: str) -> None:
    case = GroupedCase(kind, 16, 32768, 136, 272)
    output, d = new_output(case)
    rng = random.Random(0)

    def used(rows: int) -> list[int]:
        values = random_values(kind, rng, case.num_groups, rows, case.alignment)
        return values + [-1] * (case.rows - rows) if kind == "ids" else values

    case.route(used(case.rows))
    planned(case, d)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned(case, d)
    for rows in (1024, 128, 8192):
        case.route(used(rows))
        output.d.view(torch.int16).fill_(POISON)
        graph.replay()
        output.check_guard()
        case.check_rows(output.d)


def test_two_streams_at_once() -> None:
    pairs = [case_and_bits(index) for index in range(len(CASES))]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for _ in range(10):
        for index, (case, expected) in enumerate(pairs):
            with torch.cuda.stream(streams[index % 2]):
                results.append((run(case), expected, case))
    torch.cuda.synchronize()
    for d, expected, case in results:
        assert_bitwise_equal(d, expected, f"{case}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_does_not_synchronise(kind: str) -> None:
    case, expected = case_and_bits(next(i for i, each in enumerate(CASES) if each[0] == kind))
    (a, sfa), row_major = case.a, case.a[1].contiguous()
    run(case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [run(case), run(case)]
        case.a = a, row_major
        results.append(run(case))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        case.a = a, sfa
    for d in results:
        assert_bitwise_equal(d, expected)
