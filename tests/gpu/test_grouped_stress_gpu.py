"""The grouped kernels under stress: random routing, values that are wrong, sizes beyond 2**31."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from dense_tools import FP8, GuardedOutput, blocks, limits, make_operands, native_with_nan
from grouped_tools import (
    ALIGNMENTS,
    GROUPED_CONFIGS,
    KINDS,
    POISON,
    UNTOUCHED,
    ZERO,
    GroupedCase,
    GroupedGemm,
    check,
    compile_all,
    planned,
    run,
    with_config,
)

import deep_gemm
from deep_gemm.reference import gemm_nt_f64
from deep_gemm.testing import assert_bitwise_equal, compare

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_grouped")]

LAUNCHES = 1700  # for each of 3 layouts x 2 sizes: 10,200
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
GUARD = 0x5AA5


@pytest.fixture(scope="module")
def compiled_grouped() -> None:
    compile_all()


@pytest.fixture
def memory() -> Iterator[None]:
    """For tests that fill the GPU: what they leave behind is given back."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def gemms() -> list[GroupedGemm]:
    return [planned, *(with_config(config) for config in GROUPED_CONFIGS)]


# Random routing


class Router:
    """Random layouts that are made, and looked at, on the device alone."""

    def __init__(self, case: GroupedCase, seed: int) -> None:
        self.case = case
        self.generator = torch.Generator(case.device).manual_seed(seed)
        self.row = torch.arange(case.num_rows, device=case.device)

    def randint(self, low: int, high: int, size: int) -> torch.Tensor:
        """`size` integers of at least `low` and less than `high`."""
        options = {"generator": self.generator, "device": self.case.device}
        return torch.randint(low, high, (size,), **options)

    def sizes(self, most: int) -> torch.Tensor:
        """Rows of each group: none, one, any number."""
        num_groups = self.case.num_groups
        some = self.randint(0, most + 1, num_groups)
        kind = self.randint(0, 4, num_groups)
        return torch.where(kind == 0, 0, torch.where(kind == 1, 1, some)).clamp_(max=most)

    def route(self) -> torch.Tensor:
        """Write the next layout; return the state of each row."""
        kind = self.case.kind
        layout, states = self.counts() if kind == "masked" else getattr(self, kind)()
        self.case.layout.copy_(layout)
        return states

    def counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        counts = self.sizes(self.case.rows)
        group = self.row // self.case.rows
        is_used = self.row % self.case.rows < counts[group]
        return counts, torch.where(is_used, group, UNTOUCHED)

    def psum(self) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        sizes = self.sizes(2 * case.rows // case.num_groups)
        aligned = (sizes + (case.alignment - 1)) // case.alignment * case.alignment
        block_ends = aligned.cumsum(0)
        ends = (block_ends - aligned + sizes).clamp(max=case.rows)
        group = torch.searchsorted(block_ends, self.row, right=True)
        is_inside = group < case.num_groups
        group = group.clamp(max=case.num_groups - 1)
        states = torch.where(self.row < ends[group], group, ZERO)
        return ends, torch.where(is_inside, states, UNTOUCHED)

    def ids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks of random groups, or of none; filled from the front, or here and there."""
        case = self.case
        alignment, num_blocks = case.alignment, -(-case.rows // case.alignment)
        padded = num_blocks * alignment
        block_group = self.randint(-1, case.num_groups, num_blocks)
        in_order = self.randint(0, 2, 1) == 0
        block_group = torch.where(in_order, block_group.sort().values, block_group)
        filled = self.randint(0, 2 * alignment, num_blocks)[:, None]  # half of them: all rows
        position = torch.arange(alignment, device=case.device)
        is_scattered = self.randint(0, 4, num_blocks)[:, None] == 0
        is_here = self.randint(0, 3, padded).view(num_blocks, alignment) == 0
        is_valid = torch.where(is_scattered, is_here, position < filled)
        is_valid &= block_group[:, None] >= 0
        is_valid.view(-1)[case.rows :] = False
        has_valid = is_valid.any(dim=1, keepdim=True)
        states = torch.where(has_valid, ZERO, UNTOUCHED).expand(num_blocks, alignment)
        states = torch.where(is_valid, block_group[:, None], states).view(-1)[: case.rows]
        return states.clamp(min=-1), states


@pytest.mark.parametrize("n, k", [(136, 144), (520, 384)])
@pytest.mark.parametrize("kind", KINDS)
def test_random_routing(kind: str, n: int, k: int) -> None:
    """Thousands of launches, each element of each D compared with a table of all products."""
    num_groups, rows = 8, 230 if kind == "masked" else 1840
    case = GroupedCase(kind, num_groups, rows, n, k, seed=n)
    router = Router(case, seed=k)
    a, sfa = (each.flatten(0, -2) for each in case.clean)
    table = torch.empty(num_groups, case.num_rows, n, dtype=torch.bfloat16, device=case.device)
    for group, products in enumerate(table):
        deep_gemm.fp8_gemm_nt((a, sfa), (case.b[0][group], case.b[1][group]), products)
    bits = table.view(torch.int16)
    buffer = torch.full((case.num_rows + 80, n + 24), GUARD, dtype=torch.int16, device=case.device)
    expected = buffer.clone()
    inside = slice(16, 16 + case.num_rows), slice(8, 8 + n)
    d = case.shaped(buffer[inside].view(torch.bfloat16))
    wrong = torch.zeros((), dtype=torch.int64, device=case.device)
    kernels = gemms()
    for launch in range(LAUNCHES):
        case.alignment = ALIGNMENTS[kind][launch // 7 % len(ALIGNMENTS[kind])]
        states = router.route()
        case.is_computed = states >= 0
        case.poison()
        ensure_zero_padding = launch % 5 != 0
        zero = 0 if ensure_zero_padding else POISON
        rest = torch.where(states == ZERO, zero, POISON).short()[:, None]
        products = bits[states.clamp(min=0), router.row]
        expected[inside] = torch.where(case.is_computed[:, None], products, rest)
        buffer[inside].fill_(POISON)
        # the planned call every other time
        kernels[launch // 2 % len(kernels) if launch % 2 else 0](case, d, ensure_zero_padding)
        wrong += (buffer != expected).sum()
        if (launch + 1) % 500 == 0 or launch + 1 == LAUNCHES:
            assert int(wrong) == 0, f"{int(wrong)} elements are wrong by launch {launch} of {case}"


@pytest.mark.parametrize("kind", KINDS)
def test_random_routing_is_what_the_specification_says(kind: str) -> None:
    """The states that the test above works with are those of `grouped_tools`."""
    case = GroupedCase(kind, 5, 70 if kind == "masked" else 330, 8, 16)
    router = Router(case, seed=0)
    for alignment in ALIGNMENTS[kind] * 20:
        case.alignment = alignment
        states = router.route()
        case.route(case.layout.tolist())
        assert torch.equal(states, case.states.long())


# Values that are wrong


def new_output(case: GroupedCase) -> tuple[GuardedOutput, torch.Tensor]:
    output = GuardedOutput(case.num_rows, case.n)
    return output, case.shaped(output.d)


def test_ids_that_are_no_group_count_as_padding() -> None:
    rng = random.Random(0)
    case = GroupedCase("ids", 3, 700, 136, 272)
    wrong = [-1, -2, 3, 2**30, INT_MAX, INT_MIN]
    for values in (
        [rng.choice([1, *wrong]) for _ in range(700)],
        [rng.choice(wrong) for _ in range(700)],
        [rng.randint(-3, 5) for _ in range(700)],  # and several groups in a block: the first counts
    ):
        case.route(values)
        for gemm in gemms():
            check(case, gemm)
            check(case, gemm, ensure_zero_padding=False)


@pytest.mark.parametrize(
    "kind, wrong",
    [
        ("masked", [1000, 70, INT_MAX, INT_MIN, -5, 7]),
        ("masked", [101] * 6),
        ("psum", [2**30] * 6),
        ("psum", [500, 128, 300, 0, 1, 550]),
        ("psum", [INT_MAX, INT_MIN, -1, 599, 601, INT_MAX - 100]),
        ("psum", [INT_MIN, 77, 400, 128, 10**9, 600]),
        ("psum", [601] * 6),
    ],
)
@pytest.mark.parametrize("ensure_zero_padding", [True, False])
def test_wrong_counts_and_ends_do_no_harm(
    kind: str, wrong: list[int], ensure_zero_padding: bool
) -> None:
    """No hang and no write outside of D; what is in D is nobody's business."""
    case = GroupedCase(kind, 6, 100 if kind == "masked" else 600, 136, 272)
    right = [3, 0, 100, 64, 7, 65] if kind == "masked" else [100, 100, 129, 300, 400, 590]
    expected = check(case.route(right))
    for gemm in gemms():
        output, d = new_output(case)
        case.layout.copy_(torch.tensor(wrong, dtype=torch.int32))
        gemm(case, d, ensure_zero_padding)
        output.check_guard()
    assert_bitwise_equal(check(case.route(right)), expected)


@pytest.mark.parametrize(
    "kind, right, wrong, words",
    [
        ("ids", [0] * 128 + [1] * 72, {77: 3}, "77"),
        ("ids", [0] * 128 + [1] * 72, {130: -2}, "130"),
        ("ids", [0] * 128 + [1] * 72, {199: 2}, "199"),
        ("psum", [100, 150, 200], {1: 99}, "1"),
        ("psum", [100, 150, 200], {2: 201}, "2"),
        ("masked", [3, 0, 200], {1: 201}, "1"),
        ("masked", [3, 0, 200], {2: -1}, "2"),
    ],
)
def test_debug_checks_find_what_is_wrong_and_say_where(
    kind: str, right: list[int], wrong: dict[int, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = GroupedCase(kind, 3, 200, 136, 272).route(right)
    expected = run(case)
    monkeypatch.setenv("DG_DEBUG_CHECKS", "1")
    assert_bitwise_equal(run(case), expected)  # a launch that is remembered, maybe
    for index, value in wrong.items():
        case.layout[index] = value
    output, d = new_output(case)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"\[{words}\] is "):
            planned(case, d)
    assert bool((output.d.view(torch.int16) == POISON).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # no look at values while a graph is captured
        planned(case, d)
    assert_bitwise_equal(run(case.route(right)), expected)


# Beyond 2**31


def random_bytes(*shape: int) -> torch.Tensor:
    codes = torch.randint(0, 0xFE, shape, dtype=torch.uint8, device="cuda")
    return codes.add_(codes >= 0x7F).view(FP8)  # every code but those of NaN


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("kind", KINDS)
def test_an_output_of_more_than_2_to_the_31_elements(kind: str) -> None:
    m_max, n, k = 35_000, 32768, 128
    rows, begin = 2 * m_max, blocks(m_max) * 128  # contiguous layouts: of the second group
    (a, sfa), (b, sfb) = make_operands(rows, 2 * n, k)
    b, sfb = b.unflatten(0, (2, n)), sfb.unflatten(0, (2, n // 128))
    d = torch.full((rows, n), POISON, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    int32 = {"dtype": torch.int32, "device": "cuda"}
    if kind == "masked":
        begin = m_max
        a3, sfa3, d3 = (each.unflatten(0, (2, m_max)) for each in (a, sfa, d))
        sfa3 = deep_gemm.get_mn_major_tma_aligned_tensor(sfa3)
        counts = torch.tensor([m_max, m_max - 1], **int32)
        deep_gemm.m_grouped_fp8_gemm_nt_masked((a3, sfa3), (b, sfb), d3, counts, m_max)
    else:
        layout = torch.tensor([m_max, rows - 1], **int32)
        if kind == "ids":
            row = torch.arange(rows, device="cuda")
            layout = (row >= begin).int()
            layout[(row >= m_max) & (row < begin)] = -1
            layout[-1] = -1
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (a, sfa), (b, sfb), d, layout, use_psum_layout=kind == "psum"
        )
    for group, first in ((0, 0), (0, m_max - 200), (1, begin), (1, 65436), (1, rows - 201)):
        part = slice(first, first + 200)
        expected = gemm_nt_f64(a[part], sfa[part], b[group], sfb[group])
        compare(d[part], expected, **limits(200, n), name=f"rows from {first}")
    for part in (d[:m_max], d[begin:-1]):
        assert not any(bool(each.isnan().any()) for each in part.split(4096))
    bits = d.view(torch.int16)
    assert bool((bits[m_max:begin] == 0).all())
    assert bool((bits[-1] == (POISON if kind == "masked" else 0)).all())


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("kind", KINDS)
def test_an_a_of_more_than_2_to_the_31_elements(kind: str) -> None:
    m_max, n, k = 150_016, 64, 7168
    a, scales = random_bytes(2 * m_max, k), torch.rand(2 * m_max, blocks(k), device="cuda")
    sfa = native_with_nan(scales)
    b, sfb = (each.unflatten(0, (2, -1)) for each in make_operands(1, 256, k).b)
    b = b[:, :n].contiguous()
    d = torch.full((2 * m_max, n), math.nan, dtype=torch.bfloat16, device="cuda")
    int32 = {"dtype": torch.int32, "device": "cuda"}
    if kind == "masked":
        a3, d3 = (each.unflatten(0, (2, m_max)) for each in (a, d))
        sfa3 = deep_gemm.get_mn_major_tma_aligned_tensor(scales.unflatten(0, (2, m_max)))
        counts = torch.tensor([m_max, m_max], **int32)
        deep_gemm.m_grouped_fp8_gemm_nt_masked((a3, sfa3), (b, sfb), d3, counts, m_max)
    else:
        layout = torch.tensor([m_max, 2 * m_max], **int32)
        if kind == "ids":
            layout = torch.arange(2 * m_max, device="cuda").div(m_max, rounding_mode="floor").int()
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (a, sfa), (b, sfb), d, layout, use_psum_layout=kind == "psum"
        )
    for first in (0, m_max - 128, m_max, 2**31 // k - 64, 2 * m_max - 128):
        part, group = slice(first, first + 128), int(first >= m_max)
        expected = gemm_nt_f64(a[part], sfa[part], b[group], sfb[group])
        compare(d[part], expected, **limits(128, n), name=f"rows from {first}")
    assert not d.isnan().any()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_more_than_2_to_the_31_elements(kind: str) -> None:
    num_groups, n, k, m_max = 320, 1024, 7168, 3
    b = random_bytes(num_groups, n, k)
    sfb = torch.rand(num_groups, blocks(n), blocks(k), device="cuda")
    case = GroupedCase(kind, 1, m_max if kind == "masked" else num_groups * 16, 8, k, alignment=16)
    int32 = {"dtype": torch.int32, "device": "cuda"}
    if kind == "masked":
        a, sfa = (each.expand(num_groups, -1, -1).contiguous() for each in case.clean)
        d = torch.full((num_groups, m_max, n), math.nan, dtype=torch.bfloat16, device="cuda")
        counts = torch.full((num_groups,), m_max, **int32)
        deep_gemm.m_grouped_fp8_gemm_nt_masked((a, sfa), (b, sfb), d, counts, m_max)
        rows_of = {group: (a[group], sfa[group], d[group]) for group in range(num_groups)}
    else:
        case.use_alignment()
        a, sfa = case.clean
        d = torch.full((num_groups * 16, n), math.nan, dtype=torch.bfloat16, device="cuda")
        layout = torch.arange(num_groups, **int32)
        layout = layout.repeat_interleave(16) if kind == "ids" else (layout + 1) * 16
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (a, sfa), (b, sfb), d, layout, use_psum_layout=kind == "psum"
        )
        parts = (each.unflatten(0, (num_groups, 16)) for each in (a, sfa, d))
        rows_of = dict(enumerate(zip(*parts, strict=True)))
    for group in (0, 1, 291, 292, 293, 319):  # group 292 begins below 2**31
        a_rows, sfa_rows, d_rows = rows_of[group]
        expected = gemm_nt_f64(a_rows, sfa_rows, b[group], sfb[group])
        compare(d_rows, expected, **limits(len(a_rows), n), name=f"group {group}")
    assert not d.isnan().any()
