"""The grouped cases that are measured, their group sizes, and their operands."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

import deep_gemm
from benchmarks.cases import peers
from deep_gemm import reference

Layout = Literal["contiguous", "masked", "psum"]
Pair = tuple[torch.Tensor, torch.Tensor]

ALIGNMENT = 128  # of the padded layout; psum cases are measured without padding
FLOOR_BYTES_PER_US = 4.55e6  # what reading reaches on an H200: no kernel is faster than this

# Masked cases beside the peers': (groups, rows per group, n, k)
ADDED = (
    (160, 8, 3072, 5120),
    (160, 8, 5120, 1536),
    (128, 16, 1536, 2048),
    (128, 16, 2048, 768),
    (512, 2, 1024, 2048),
)


@dataclass(frozen=True, order=True)
class Family:
    """Groups, their rows and their weights [groups, n, k]; one case for each layout of the rows."""

    groups: int
    m_per_group: int  # rows of a group, about
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.groups}x{self.m_per_group} {self.n}x{self.k}"

    @property
    def sizes(self) -> list[int]:
        """Rows of each group, drawn as the peers drew them."""
        rng = random.Random(1)
        m = self.m_per_group
        return [1 if m == 1 else max(1, int(m * rng.uniform(0.7, 1.3))) for _ in range(self.groups)]


@dataclass(frozen=True, order=True)
class GroupedCase:
    """One layout of a family. Padding is no work: `tokens`, `flops`, `bytes` are of real rows."""

    layout: Layout
    family: Family

    def __str__(self) -> str:
        return f"{self.layout} {self.family}"

    @functools.cached_property
    def spans(self) -> list[tuple[int, int]]:
        """First and past-last row of each group among all rows of A."""
        spans = []
        start = end = 0
        for group, size in enumerate(self.family.sizes):
            if self.layout == "masked":
                start = group * self.m_max
            else:
                start = end if self.layout == "psum" else -(-end // ALIGNMENT) * ALIGNMENT
            end = start + size
            spans.append((start, end))
        return spans

    @property
    def m_max(self) -> int:
        """Rows of a group's buffer in the masked layout."""
        return 4096 if self.family.m_per_group >= 128 else 128

    @property
    def rows(self) -> int:
        """Rows of A, padding included, of all groups."""
        if self.layout == "masked":
            return self.family.groups * self.m_max
        end = self.spans[-1][1]
        return end if self.layout == "psum" else -(-end // ALIGNMENT) * ALIGNMENT

    @property
    def m(self) -> int:
        """Rows of A as the call sees them: those of one group in the masked layout."""
        return self.m_max if self.layout == "masked" else self.rows

    @property
    def tokens(self) -> int:
        return sum(self.family.sizes)

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.family.n * self.family.k

    @property
    def bytes(self) -> int:
        """Bytes that any kernel moves: weights, real rows of A, all scales, real rows of D."""
        n, k = self.family.n, self.family.k
        used = sum(size > 0 for size in self.family.sizes)
        scales = 4 * -(-k // 128) * (self.tokens + used * -(-n // 128))
        return (self.tokens + used * n) * k + scales + 2 * self.tokens * n

    @property
    def floor_us(self) -> float:
        return self.bytes / FLOOR_BYTES_PER_US

    @property
    def alignment(self) -> int:
        """What `set_mk_alignment_for_contiguous_layout` has to be told."""
        return 1 if self.layout == "psum" else ALIGNMENT

    @property
    def peer(self) -> dict[str, Any]:
        """The peers' row, or {} where there is none."""
        rows = peers()["grouped"]
        mine = self.layout, self.family
        return next((row for row in rows if (row["layout"], _family(row)) == mine), {})


def grouped_cases(patterns: str | None = None) -> list[GroupedCase]:
    """The peers' cases, the added ones, and each of these in the prefix-sum layout without padding.

    `patterns`, separated by commas, are words that a case has to have ("masked 32x8 4096x7168"); *
    and ? are wildcards ("psum *x7168").

    Raises:
        ValueError: a pattern matches nothing.
    """
    padded = [GroupedCase(row["layout"], _family(row)) for row in peers()["grouped"]]
    padded += [GroupedCase("masked", Family(*each)) for each in ADDED]
    cases = padded + [GroupedCase("psum", case.family) for case in padded]
    if patterns is None:
        return cases
    selected: list[GroupedCase] = []
    for pattern in patterns.split(","):
        matches = [case for case in cases if _matches(case, pattern)]
        if not matches:
            raise ValueError(
                f"shapes: {pattern.strip()!r} matches none of the {len(cases)} grouped cases; they "
                f"look like {str(cases[0])!r}"
            )
        selected += [case for case in matches if case not in selected]
    return selected


def by_family(cases: Iterable[GroupedCase]) -> dict[Family, list[GroupedCase]]:
    """Cases that share weights and rows."""
    families: dict[Family, list[GroupedCase]] = {}
    for case in cases:
        families.setdefault(case.family, []).append(case)
    return families


class Data:
    """Random normal rows and weights of a family, really quantised, and the product of each row."""

    def __init__(self, family: Family, device: str) -> None:
        groups, n, k = family.groups, family.n, family.k
        tokens, k_blocks = sum(family.sizes), -(-k // 128)
        self.family = family
        self.b: Pair = (
            torch.empty(groups, n, k, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(groups, -(-n // 128), k_blocks, device=device),
        )
        for weight, scales in zip(*self.b, strict=True):  # one by one: a small temporary
            whole = torch.randn(n, k, dtype=torch.bfloat16, device=device)
            for out, quantised in zip(
                (weight, scales), deep_gemm.per_block_cast_to_fp8(whole, False), strict=True
            ):
                out.copy_(quantised)
        x = torch.randn(tokens, k, dtype=torch.bfloat16, device=device)
        self.rows: Pair = deep_gemm.per_token_cast_to_fp8(x, False)
        self.expected = torch.empty(tokens, n, dtype=torch.bfloat16, device=device)
        ends = torch.tensor(family.sizes).cumsum(0)[:-1].tolist()
        parts = [each.tensor_split(ends) for each in (*self.rows, self.expected)]
        for a, sfa, d, b, sfb in zip(*parts, *self.b, strict=True):
            reference.gemm_nt(a, sfa, b, sfb, d)


class Operands:
    """The rows of a family laid out for one case, and D; padding rows hold data like the others."""

    def __init__(self, case: GroupedCase, data: Data) -> None:
        device = data.expected.device
        family, rows = case.family, case.rows
        spans = torch.tensor(case.spans, dtype=torch.int32)
        self.case = case
        self.data = data
        self.b = data.b
        self.row_of_token = torch.cat([torch.arange(*span) for span in case.spans]).to(device)
        token_of_row = torch.arange(rows, device=device) % case.tokens
        token_of_row[self.row_of_token] = torch.arange(case.tokens, device=device)
        a = data.rows[0].view(torch.uint8)[token_of_row].view(torch.float8_e4m3fn)
        sfa = data.rows[1][token_of_row]
        self.d = torch.empty(rows, family.n, dtype=torch.bfloat16, device=device)
        if case.layout == "masked":
            shape = family.groups, case.m_max
            a, sfa, self.d = (each.unflatten(0, shape) for each in (a, sfa, self.d))
            layout = spans[:, 1] - spans[:, 0]
        elif case.layout == "psum":
            layout = spans[:, 1].contiguous()
        else:
            layout = torch.full((rows,), -1, dtype=torch.int32)
            for group, span in enumerate(case.spans):
                layout[slice(*span)] = group
        self.a: Pair = a, deep_gemm.get_mn_major_tma_aligned_tensor(sfa)
        self.grouped_layout = layout.to(device)  # `masked_m` in the masked layout

    def ours(self) -> None:
        """The call; prefix sums need the alignment of `aligned`."""
        expected_m = self.case.family.m_per_group
        if self.case.layout == "masked":
            deep_gemm.m_grouped_fp8_gemm_nt_masked(
                self.a, self.b, self.d, self.grouped_layout, expected_m
            )
        elif self.case.layout == "psum":
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                self.a, self.b, self.d, self.grouped_layout,
                use_psum_layout=True, expected_m_for_psum_layout=expected_m,
            )  # fmt: skip
        else:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(self.a, self.b, self.d, self.grouped_layout)

    def results(self, call: Callable[[], object]) -> torch.Tensor:
        """Rows of D that belong to a token [tokens, n], of a call on a D full of NaN.

        Raises:
            AssertionError: a padding row was written, with other values than the zeros that may
                stand in a contiguous one.
        """
        self.d.fill_(float("nan"))
        call()
        d = self.d.view(-1, self.case.family.n)
        is_wrong = d.isnan().logical_not_().any(dim=1)
        is_wrong[self.row_of_token] = False
        if self.case.layout != "masked":
            is_wrong[is_wrong.clone()] = d[is_wrong].any(dim=1)
        if is_wrong.any():
            row = int(is_wrong.nonzero()[0])
            raise AssertionError(f"{self.case}: row {row} is padding, but was written")
        return d[self.row_of_token]


@contextmanager
def aligned(case: GroupedCase) -> Iterator[None]:
    """The alignment that a case's calls need, in force for a while."""
    before = deep_gemm.get_mk_alignment_for_contiguous_layout()
    deep_gemm.set_mk_alignment_for_contiguous_layout(case.alignment)
    try:
        yield
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(before)


def _family(row: dict[str, Any]) -> Family:
    return Family(row["groups"], row["m_per_group"], row["n"], row["k"])


def _matches(case: GroupedCase, pattern: str) -> bool:
    words = str(case).split()
    wanted = pattern.split()
    return bool(wanted) and all(any(fnmatchcase(word, each) for word in words) for each in wanted)
