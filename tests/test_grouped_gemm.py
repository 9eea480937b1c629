"""Grouped GEMM against the specification: three layouts, every row of D in its right state.

On the CPU, that is, by the reference backend; `gpu/test_grouped_gpu.py` has the kernels.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from grouped_tools import (
    ALIGNMENTS,
    CONTIGUOUS,
    KINDS,
    POISON,
    GroupedCase,
    check,
    make_case,
    random_sizes,
    random_values,
    run,
)
from hypothesis import given
from hypothesis import strategies as st

import deep_gemm
from deep_gemm.testing import assert_bitwise_equal

N, K = 264, 272
LAYOUTS = [(kind, alignment) for kind in KINDS for alignment in ALIGNMENTS[kind]]
FILLS = ["normal", "exponents", "zeros", "outliers", "tiny", "integers"]
M_MAX = [1, 2, 4, 8, 16, 31, 32, 33, 63, 64, 65]


def case_of(kind: str, sizes: list[int], n: int = N, k: int = K, **options: Any) -> GroupedCase:
    return make_case(kind, sizes, n, k, device="cpu", **options)


# Every layout


@pytest.mark.parametrize("ensure_zero_padding", [True, False])
@pytest.mark.parametrize("kind, alignment", LAYOUTS)
def test_every_row_is_in_its_state(kind: str, alignment: int, ensure_zero_padding: bool) -> None:
    rng = random.Random(0)
    for seed in range(6):
        sizes = random_sizes(rng, rng.choice([1, 2, 5, 9]), 150, alignment)
        case = case_of(kind, sizes, alignment=alignment, seed=seed)
        check(case, ensure_zero_padding=ensure_zero_padding)


@pytest.mark.parametrize("kind, alignment", LAYOUTS)
def test_sums_that_are_exact_are_right_to_the_bit(kind: str, alignment: int) -> None:
    sizes = [alignment + 1, 0, 1, alignment, 77]
    case = case_of(kind, sizes, alignment=alignment, fill="integers", seed=1)
    d = check(case)
    assert_bitwise_equal(d[case.is_computed], case.oracle().bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fill", FILLS)
def test_every_kind_of_data(kind: str, fill: str) -> None:
    check(case_of(kind, [3, 0, 130, 1], 136, 528, fill=fill))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, k", [(8, 16), (24, 48), (128, 128), (136, 144), (64, 1040)])
def test_every_size(kind: str, n: int, k: int) -> None:
    check(case_of(kind, [5, 128, 0, 129], n, k))


@pytest.mark.parametrize("alignment", ALIGNMENTS["ids"])
def test_groups_in_order_as_clients_have_them(alignment: int) -> None:
    sizes = [100, 0, 1, 128, 0, 63]
    case = case_of("ids", sizes, alignment=alignment, wild=False)
    assert [len(case.group_rows.get(group, [])) for group in range(6)] == sizes
    check(case)


layouts = st.sampled_from(LAYOUTS)
some_rows = st.one_of(st.sampled_from([0, 0, 1, 15, 16, 17, 127, 128, 129]), st.integers(0, 200))


@given(
    layout=layouts,
    sizes=st.lists(some_rows, min_size=1, max_size=8),
    n=st.integers(1, 20).map(lambda x: 8 * x),
    k=st.integers(1, 20).map(lambda x: 16 * x),
    seed=st.integers(0, 1000),
    ensure_zero_padding=st.booleans(),
)
def test_any_layout(
    layout: tuple[str, int], sizes: list[int], n: int, k: int, seed: int, ensure_zero_padding: bool
) -> None:
    kind, alignment = layout
    case = case_of(kind, sizes, n, k, alignment=alignment, seed=seed)
    check(case, ensure_zero_padding=ensure_zero_padding)


@given(layout=layouts, rows=st.integers(1, 300), groups=st.integers(1, 9), seed=st.integers(0, 99))
def test_any_contents_of_buffers_that_stay(
    layout: tuple[str, int], rows: int, groups: int, seed: int
) -> None:
    kind, alignment = layout
    case = GroupedCase(kind, groups, rows, 24, 48, alignment=alignment, device="cpu")
    rng = random.Random(seed)
    for _ in range(3):
        check(case.route(random_values(kind, rng, groups, rows, alignment)))


@pytest.mark.parametrize("m_max", M_MAX)
@pytest.mark.parametrize("num_groups", [1, 3, 4])
def test_masked_with_any_number_of_rows_per_group(m_max: int, num_groups: int) -> None:
    rng = random.Random(m_max)
    for counts in ([m_max] * num_groups, random_sizes(rng, num_groups, m_max)):
        check(case_of("masked", counts, 136, 144, rows=m_max))


# Extremes


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_no_rows(kind: str) -> None:
    case = GroupedCase(kind, 3, 0, N, K, device="cpu").route([] if kind == "ids" else [0, 0, 0])
    check(case)
    check(case, ensure_zero_padding=False)


def test_no_rows_per_group() -> None:
    check(GroupedCase("masked", 3, 0, N, K, device="cpu").route([0, 0, 0]))


@pytest.mark.parametrize("kind", KINDS)
def test_no_group_has_a_row(kind: str) -> None:
    case = GroupedCase(kind, 3, 256, N, K, device="cpu")
    d = check(case.route([-1] * 256 if kind == "ids" else [0] * 3))
    assert bool((d.view(torch.int16) == POISON).all())


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_nothing_are_zero(kind: str) -> None:
    case = case_of(kind, [3, 0, 130], 24, 0)
    d = check(case)
    assert not d[case.is_computed].view(torch.int16).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("owner", [0, 3, 6])
def test_one_group_has_all_rows(kind: str, owner: int) -> None:
    sizes = [0] * 7
    sizes[owner] = 300
    case = case_of(kind, sizes)
    assert list(case.group_rows) == [owner]
    check(case)


@pytest.mark.parametrize(
    "kind, alignment", [("ids", 16), ("psum", 1), ("psum", 16), ("masked", 128)]
)
def test_512_groups(kind: str, alignment: int) -> None:
    rng = random.Random(0)
    for seed in range(2):
        check(case_of(kind, random_sizes(rng, 512, 5, 4), 24, 144, alignment=alignment, seed=seed))


@pytest.mark.parametrize("kind", CONTIGUOUS)
@pytest.mark.parametrize("alignment", [1024, 2**20, 2**40])
def test_an_alignment_larger_than_all_rows(kind: str, alignment: int) -> None:
    case = GroupedCase(kind, 2, 300, 24, 48, alignment=alignment, device="cpu")
    check(case.route([-1] * 100 + [1] * 150 + [-1] * 50 if kind == "ids" else [250, 250]))


@pytest.mark.parametrize("ensure_zero_padding", [True, False])
def test_the_last_block_may_be_shorter(ensure_zero_padding: bool) -> None:
    case = GroupedCase("ids", 2, 200, N, K, device="cpu").route([0] * 128 + [-1, 1] * 36)
    check(case, ensure_zero_padding=ensure_zero_padding)
    case = GroupedCase("psum", 2, 200, N, K, device="cpu").route([100, 190])
    check(case, ensure_zero_padding=ensure_zero_padding)


def test_an_end_may_be_anywhere_in_the_gap_of_a_group_without_rows() -> None:
    for middle in (100, 101, 127, 128):
        case = GroupedCase("psum", 3, 300, N, K, device="cpu").route([100, middle, 200])
        assert list(case.group_rows) == [0, 2]
        check(case)


def test_a_multiple_of_the_alignment_leaves_no_gap() -> None:
    case = GroupedCase("psum", 3, 256, N, K, device="cpu").route([128, 128, 256])
    assert not bool((case.states < 0).any())
    check(case)


# A row depends on nothing but itself


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("byte, scale", [(0x7F, math.nan), (0x7E, math.inf), (0xFE, 1e38), (0, 0)])
def test_padding_has_no_effect(kind: str, byte: int, scale: float) -> None:
    case = case_of(kind, [3, 0, 130, 1])
    expected = check(case)
    assert_bitwise_equal(check(case.poison(byte, scale)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_have_no_effect(kind: str) -> None:
    case = case_of(kind, [70, 2, 130, 40])
    expected = run(case)
    for group, rows in case.group_rows.items():
        kept = torch.tensor(rows[::2])
        changed = torch.ones(case.num_rows, dtype=torch.bool)
        changed[kept] = False
        changed = changed.view(case.a[0].shape[:-1])
        case.poison()
        case.a[0].view(torch.uint8)[changed] = 0x7F
        case.a[1][changed] = math.nan
        assert_bitwise_equal(run(case)[kept], expected[kept], f"group {group}")


# Forms and names


def both_runs(case: GroupedCase, function: Any, *arguments: Any, **keywords: Any) -> None:
    """`function`, called so (D comes third), gives what the plain call gives."""
    expected = check(case)
    d = torch.full_like(expected, math.nan)
    d.view(torch.int16).fill_(POISON)
    a, b, *rest = arguments
    assert function(a, b, case.shaped(d), *rest, **keywords) is None
    assert_bitwise_equal(d, expected)


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_spellings_of_the_contiguous_call(kind: str) -> None:
    case = case_of(kind, [100, 0, 30])
    a, b, layout = case.a, case.b, case.layout
    psum = {"use_psum_layout": kind == "psum"}
    nt = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    for function in (nt, deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous):
        both_runs(case, function, a, b, layout, **psum)
        both_runs(case, function, a, b, grouped_layout=layout, **psum)
        both_runs(case, function, a, b, m_indices=layout, **psum)
        both_runs(case, function, list(a), list(b), layout, **psum)
        options = (1, 128, 128), None, None, "nk", True, kind == "psum", True
        both_runs(case, function, a, b, layout, *options)
    both_runs(case, nt, a, b, layout, recipe=[1, 128, 128], **psum)
    both_runs(case, nt, a, b, layout, recipe_a=(1, 128), recipe_b=(128, 128), **psum)
    both_runs(case, nt, a, b, layout, compiled_dims="mnk", disable_ue8m0_cast=True, **psum)
    for expected_m in (None, 0, 1, 64, 10**6):
        both_runs(case, nt, a, b, layout, expected_m_for_psum_layout=expected_m, **psum)


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_transposed_weights(kind: str) -> None:
    case = case_of(kind, [100, 0, 30])
    weights, scales = case.b
    b = weights.mT, scales.mT
    psum = {"use_psum_layout": kind == "psum"}
    for function in (
        deep_gemm.m_grouped_fp8_gemm_nn_contiguous,
        deep_gemm.m_grouped_fp8_fp4_gemm_nn_contiguous,
    ):
        both_runs(case, function, case.a, b, case.layout, **psum)
        both_runs(case, function, case.a, list(b), m_indices=case.layout, **psum)
        both_runs(case, function, case.a, b, grouped_layout=case.layout, **psum)
        d = torch.empty(case.num_rows, case.n, dtype=torch.bfloat16)
        d.view(torch.int16).fill_(POISON)
        function(case.a, b, d, case.layout, ensure_zero_padding=False, **psum)
        case.check_rows(d, ensure_zero_padding=False)


@pytest.mark.parametrize("expected_m", [0, 1, 5, 128, 10**6])
def test_spellings_of_the_masked_call(expected_m: int) -> None:
    case = case_of("masked", [9, 0, 70])
    a, b, masked_m = case.a, case.b, case.layout
    for function in (
        deep_gemm.m_grouped_fp8_gemm_nt_masked,
        deep_gemm.fp8_m_grouped_gemm_nt_masked,
        deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked,
    ):
        both_runs(case, function, a, b, masked_m, expected_m)
        both_runs(case, function, list(a), list(b), masked_m=masked_m, expected_m=expected_m)
        both_runs(case, function, a, b, masked_m, expected_m, (1, 128, 128))
        both_runs(
            case, function, a, b, masked_m, expected_m,
            recipe_a=(1, 128), recipe_b=(128, 128), compiled_dims="mn", disable_ue8m0_cast=True,
        )  # fmt: skip


def test_names_of_2025() -> None:
    contiguous = deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous
    assert contiguous is deep_gemm.legacy.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous
    case = case_of("ids", [100, 0, 30])
    both_runs(case, contiguous, list(case.a), list(case.b), case.layout)
    d = run(case)
    case.poison()
    again = torch.full_like(d, math.nan)
    again.view(torch.int16).fill_(POISON)
    contiguous(lhs=case.a, rhs=case.b, out=again, m_indices=case.layout)
    assert_bitwise_equal(again, d)

    masked = deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_masked
    assert masked is deep_gemm.legacy.m_grouped_gemm_fp8_fp8_bf16_nt_masked
    case = case_of("masked", [9, 0, 70])
    both_runs(case, masked, list(case.a), list(case.b), case.layout, 30)
    again = torch.full((case.num_rows, case.n), POISON, dtype=torch.int16).view(torch.bfloat16)
    out = case.shaped(again)
    masked(lhs=case.a, rhs=case.b, out=out, masked_m=case.layout, expected_m=30)
    assert_bitwise_equal(again, run(case))


def test_every_name_is_public() -> None:
    for name in (
        "m_grouped_fp8_gemm_nt_contiguous",
        "m_grouped_fp8_gemm_nn_contiguous",
        "m_grouped_fp8_gemm_nt_masked",
        "fp8_m_grouped_gemm_nt_masked",
        "m_grouped_fp8_fp4_gemm_nt_contiguous",
        "m_grouped_fp8_fp4_gemm_nn_contiguous",
        "m_grouped_fp8_fp4_gemm_nt_masked",
        "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
        "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
    ):
        assert name in deep_gemm.__all__
        assert callable(getattr(deep_gemm, name))


# Layouts of operands


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_of_the_scales_of_a(kind: str) -> None:
    case = case_of(kind, [33, 0, 130, 1])
    a, sfa = case.a
    expected = check(case)
    native = deep_gemm.get_mn_major_tma_aligned_tensor(sfa.contiguous())
    for other in (
        sfa.contiguous(),
        sfa.mT.contiguous().mT,
        torch.nn.functional.pad(sfa, (1, 3))[..., 1:-3],
        native,
    ):
        case.a = a, other
        assert_bitwise_equal(run(case), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_b_may_be_transposed_in_each_group(kind: str) -> None:
    case = case_of(kind, [33, 0, 130, 1])
    expected = check(case)
    weights, sfb = case.b
    case.b = weights, sfb.mT.contiguous().mT
    assert_bitwise_equal(run(case), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_as_close_as_they_are_wide(kind: str) -> None:
    case = case_of(kind, [33, 0, 130, 1])
    expected = check(case)
    case.a, case.b = ((data.contiguous(), scales) for data, scales in (case.a, case.b))
    assert_bitwise_equal(run(case), expected)


def test_inputs_are_left_alone() -> None:
    for kind in KINDS:
        case = case_of(kind, [33, 0, 130, 1])
        tensors = [*case.a, *case.b, case.layout]
        before = [tensor.clone() for tensor in tensors]
        check(case)
        for tensor, copy in zip(tensors, before, strict=True):
            assert_bitwise_equal(tensor, copy)
