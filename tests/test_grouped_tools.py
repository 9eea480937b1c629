"""The tools of the grouped tests: states from the specification, layouts, checks that can fail."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from grouped_tools import (
    KINDS,
    UNTOUCHED,
    ZERO,
    GroupedCase,
    check,
    ids_states,
    make_case,
    make_ends,
    make_ids,
    masked_states,
    planned,
    psum_states,
    random_sizes,
)


def case_of(kind: str, sizes: list[int], **options: Any) -> GroupedCase:
    return make_case(kind, sizes, 264, 272, device="cpu", **options)


def test_states_of_ids() -> None:
    ids = [-1, 2, 2, -1, -1, -1, -1, -1, 0, 0, 0, 0, 9, 1]
    expected = [ZERO, 2, 2, ZERO] + [UNTOUCHED] * 4 + [0] * 4 + [ZERO, 1]
    assert ids_states(ids, 3, 4) == expected
    assert ids_states([], 3, 4) == []


def test_states_of_prefix_sums() -> None:
    ends = [0, 3, 4, 4, 9, 10]  # from 0 0 4 4 4 12
    expected = [1, 1, 1, ZERO] + [4] * 5 + [ZERO] * 3 + [UNTOUCHED] * 3
    assert psum_states(ends, 15, 4) == expected
    assert psum_states(ends, 10, 4) == expected[:10]
    assert psum_states([2, 2, 5], 6, 1) == [0, 0, 2, 2, 2, UNTOUCHED]
    assert psum_states([0, 0], 2, 128) == [UNTOUCHED] * 2


def test_states_of_counts() -> None:
    assert masked_states([2, 0, 3], 3) == [0, 0] + [UNTOUCHED] * 4 + [2] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_noticed(kind: str) -> None:
    case = case_of(kind, [33, 0, 130, 1], wild=False)
    computed = case.is_computed.nonzero().flatten().tolist()
    padding = (~case.is_computed).nonzero().flatten().tolist()

    def with_damage(damage: Any) -> str:
        def gemm(case: GroupedCase, d: torch.Tensor, ensure_zero_padding: bool) -> None:
            planned(case, d, ensure_zero_padding)
            damage(d.flatten(0, -2))

        with pytest.raises(AssertionError) as caught:
            check(case, gemm)
        return str(caught.value)

    outside = with_damage(lambda d: d.as_strided((1,), (1,), d.storage_offset() - 1).zero_())
    assert "outside of D were written" in outside
    row = padding[-1]
    message = with_damage(lambda d: d[row, -1:].fill_(-0.0))
    assert f"row {row}, " in message
    assert "left alone" in message or "zero bits" in message
    assert "NaN" in with_damage(lambda d: d[computed[-1], -1:].fill_(math.nan))
    assert "computed rows" in with_damage(lambda d: d[computed[7]].mul_(1.03))
    assert "computed rows" in with_damage(lambda d: d[computed[0]].copy_(d[computed[-1]].clone()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_another_group_is_noticed(kind: str) -> None:
    case = case_of(kind, [33, 0, 130, 1])
    case.oracle()
    case.b = tuple(tensor.roll(1, 0) for tensor in case.b)
    with pytest.raises(AssertionError, match="computed rows"):
        check(case)


def test_makers_of_layouts_keep_their_promises() -> None:
    rng = random.Random(0)
    for _ in range(200):
        alignment = rng.choice([1, 8, 16, 64])
        sizes = random_sizes(rng, rng.randint(1, 9), 100, alignment)
        ends = make_ends(sizes, alignment, rng)
        assert ends == sorted(ends)
        states = psum_states(ends, ends[-1], alignment)
        assert [states.count(group) for group in range(len(sizes))] == sizes
        ids = make_ids(sizes, alignment, rng, wild=False)
        assert [ids.count(group) for group in range(len(sizes))] == sizes
        ids = make_ids(sizes, alignment, rng)
        for begin in range(0, len(ids), alignment):
            assert len({each for each in ids[begin : begin + alignment] if each >= 0}) <= 1
