"""Cases of the grouped GEMM, and what has to become of every row of D, from the specification.

A case has one of three layouts: "ids" (a group id per row), "psum" (the end row of each group) or
"masked" (a count per group). Every row that is padding holds NaN, in A and in its scales.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from dense_tools import (
    GuardedOutput,
    Pair,
    blocks,
    limits,
    make_operands,
    native_with_nan,
)

import deep_gemm
from deep_gemm import jit
from deep_gemm.config import settings
from deep_gemm.grouped_gemm import run_contiguous, run_masked
from deep_gemm.plan import GROUPED_CANDIDATES, make_config
from deep_gemm.reference import gemm_nt_f64
from deep_gemm.testing import compare
from deep_gemm.types import KernelConfig

KINDS = ["ids", "psum", "masked"]
CONTIGUOUS = ["ids", "psum"]
ALIGNMENTS = {"ids": [16, 64, 128], "psum": [1, 8, 16, 64, 128], "masked": [128]}

# States of a row of D; 0 and more: computed, with the weight of that group.
ZERO, UNTOUCHED = -1, -2
POISON = -1  # the bits that `GuardedOutput` fills D with: a NaN

# Every kernel that a plan may choose, then what none chooses today but the kernel can do: clusters
# of other tiles, columns that are not a power of two, a pipeline of two stages.
GROUPED_CONFIGS = [candidate.config for candidate in GROUPED_CANDIDATES] + [
    make_config(64, 16, 1, num_partials=4, is_grouped=True),
    make_config(64, 32, 1, cluster_n=2, num_partials=4, is_grouped=True),
    make_config(64, 64, 1, cluster_n=2, num_partials=4, is_grouped=True),
    make_config(64, 128, 1, cluster_n=2, num_stages=2, num_partials=2, is_grouped=True),
    make_config(128, 96, 2, cluster_n=2, is_grouped=True),
    make_config(128, 128, 2, cluster_n=2, is_grouped=True),
    make_config(128, 80, 2, is_grouped=True),
    make_config(192, 112, 3, is_grouped=True),
    make_config(192, 128, 3, num_stages=2, is_grouped=True),
]


def compile_all() -> None:
    """Every kernel of `GROUPED_CONFIGS` is in memory."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda c: jit.build("fp8_gemm_1d2d", c.constants()), GROUPED_CONFIGS))


def align(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


# What the specification says about each row


def ids_states(ids: Sequence[int], num_groups: int, alignment: int) -> list[int]:
    """A block belongs to the group of its first valid row; without one it is not written."""
    states = []
    for row, group in enumerate(ids):
        if row % alignment == 0:
            block = ids[row : row + alignment]
            valid = [each for each in block if 0 <= each < num_groups]
        if not valid:
            states.append(UNTOUCHED)
        elif 0 <= group < num_groups:
            states.append(valid[0])
        else:
            states.append(ZERO)
    return states


def psum_states(ends: Sequence[int], m: int, alignment: int) -> list[int]:
    """Group g has the rows from align(ends[g - 1]) to ends[g]; behind them its block is gap."""
    states = [UNTOUCHED] * m
    begin = 0
    for group, end in enumerate(ends):
        if end > begin:
            for row in range(begin, end):
                states[row] = group
            for row in range(end, min(align(end, alignment), m)):
                states[row] = ZERO
        begin = align(end, alignment)
    return states


def masked_states(counts: Sequence[int], m_max: int) -> list[int]:
    """Of the m_max rows of a group the first `count` are computed, the others never written."""
    states = []
    for group, count in enumerate(counts):
        for row in range(m_max):
            states.append(group if row < count else UNTOUCHED)
    return states


# Layouts


def random_sizes(rng: random.Random, num_groups: int, most: int, alignment: int = 128) -> list[int]:
    """Rows per group, `most` at most: none, one, odd, around the alignment, many."""
    usual = [0, 0, 1, 3, 17, alignment - 1, alignment, alignment + 1, most]
    sizes = [rng.choice([*usual, rng.randint(0, most)]) for _ in range(num_groups)]
    return [min(size, most) for size in sizes]


def make_ids(
    sizes: Sequence[int], alignment: int, rng: random.Random, wild: bool = True
) -> list[int]:
    """Group ids of rows. `wild`: blocks in any order, -1 anywhere, whole blocks of -1, a short end.

    Else as clients do it: group after group, each filled up with -1 to a whole block.
    """
    all_blocks = []
    for group, size in enumerate(sizes):
        rows = align(size, alignment)
        if wild and size:
            rows += alignment * rng.randint(0, 1)
        scattered = wild and rng.random() < 0.5
        taken = rng.sample(range(rows), size) if scattered else range(size)
        ids = [-1] * rows
        for row in taken:
            ids[row] = group
        all_blocks += [ids[row : row + alignment] for row in range(0, rows, alignment)]
    if wild:
        all_blocks += [[-1] * alignment for _ in range(rng.randint(0, 1 + len(all_blocks) // 4))]
        rng.shuffle(all_blocks)
    ids = [each for block in all_blocks for each in block]
    return ids[: len(ids) - rng.randrange(alignment)] if wild and ids else ids


def make_ends(sizes: Sequence[int], alignment: int, rng: random.Random) -> list[int]:
    """Ends of groups; that of an empty group is anywhere in the gap that it has no rows in."""
    ends, begin, previous = [], 0, 0
    for size in sizes:
        end = begin + size if size else rng.randint(previous, begin)
        ends.append(end)
        begin, previous = align(end, alignment), end
    return ends


def random_values(
    kind: str, rng: random.Random, num_groups: int, rows: int, alignment: int
) -> list[int]:
    """Contents of `grouped_layout` or `masked_m` for a given number of rows, or of rows a group."""
    if kind == "masked":
        return random_sizes(rng, num_groups, rows)
    room = rows // alignment * alignment
    sizes = []
    for size in random_sizes(rng, num_groups, max(1, 2 * rows // num_groups), alignment):
        sizes.append(min(size, room))
        room -= align(sizes[-1], alignment)
    if kind == "psum":
        return make_ends(sizes, alignment, rng)
    ids = make_ids(sizes, alignment, rng)[:rows]
    return ids + [-1] * (rows - len(ids))


class GroupedCase:
    """Operands of one grouped GEMM, its layout, and the state of every row of D.

    `rows`: of A, or of each group of A ("masked"). The operands are as of `make_operands`: rows
    are further apart than they are wide, scales are native, with NaN in all that is between.
    """

    def __init__(
        self,
        kind: str,
        num_groups: int,
        rows: int,
        n: int,
        k: int,
        *,
        alignment: int = 128,
        fill: str = "normal",
        seed: int = 0,
        device: str = "cuda",
    ) -> None:
        self.kind, self.num_groups, self.n, self.k = kind, num_groups, n, k
        self.rows, self.alignment, self.device = rows, alignment, device
        leading = (num_groups, rows) if kind == "masked" else (rows,)
        self.num_rows = math.prod(leading)
        n_blocks = blocks(n)
        (a, sfa), (b, sfb) = make_operands(
            max(self.num_rows, 1), num_groups * n_blocks * 128, k, fill, seed, device
        )
        a, sfa = (each[: self.num_rows].unflatten(0, leading) for each in (a, sfa))
        self.clean = a.clone(), sfa.clone()
        self.a: Pair = (a, native_with_nan(sfa) if sfa.dim() == 2 else _native_groups(sfa))
        wide = torch.full((num_groups * n + 2, k + 32), 0x7F, dtype=torch.uint8, device=device)
        weights = wide[: num_groups * n, :k].view(a.dtype).unflatten(0, (num_groups, n))
        weights.copy_(b.unflatten(0, (num_groups, n_blocks * 128))[:, :n])
        self.b: Pair = (weights, sfb.unflatten(0, (num_groups, n_blocks)))
        length = rows if kind == "ids" else num_groups
        self.layout = torch.zeros(length, dtype=torch.int32, device=device)

    def route(self, values: Sequence[int]) -> GroupedCase:
        """Write new contents into the layout, and NaN into all rows that are padding now."""
        self.layout.copy_(torch.tensor(values, dtype=torch.int32))
        if self.kind == "ids":
            states = ids_states(values, self.num_groups, self.alignment)
        elif self.kind == "psum":
            states = psum_states(values, self.rows, self.alignment)
        else:
            states = masked_states(values, self.rows)
        self.group_rows: dict[int, list[int]] = {}
        for row, state in enumerate(states):
            if state >= 0:
                self.group_rows.setdefault(state, []).append(row)
        self.states = torch.tensor(states, dtype=torch.int32, device=self.device)
        self.is_computed = self.states >= 0
        self._oracle: torch.Tensor | None = None
        return self.poison()

    def poison(self, byte: int = 0x7F, scale: float = math.nan) -> GroupedCase:
        """Fill the rows that are padding with that byte, and their scales with `scale`."""
        (a, sfa), (clean_a, clean_sfa) = self.a, self.clean
        is_padding = ~self.is_computed.view(a.shape[:-1])[..., None]
        a.view(torch.uint8).copy_(clean_a.view(torch.uint8)).masked_fill_(is_padding, byte)
        sfa.copy_(clean_sfa).masked_fill_(is_padding, scale)
        return self

    def shaped(self, d: torch.Tensor) -> torch.Tensor:
        """D [all rows, n] as the call takes it."""
        return d.unflatten(0, self.a[0].shape[:-1])

    def operands_of(self, group: int) -> tuple[Pair, Pair]:
        """The dense GEMM that a group stands for."""
        rows = torch.tensor(self.group_rows[group], device=self.device)
        return self.rows_of_a(rows), (self.b[0][group], self.b[1][group])

    def rows_of_a(self, rows: torch.Tensor) -> Pair:
        """A copy of some rows of A, all groups' taken together, and of their scales."""
        a, sfa = (each.flatten(0, -2) for each in self.a)
        a_rows = a.view(torch.uint8)[rows].view(a.dtype)  # not every torch indexes FP8
        return a_rows, native_with_nan(sfa[rows])

    def oracle(self) -> torch.Tensor:
        """float64 [computed rows, n], in the order of the rows."""
        if self._oracle is None:
            shape = self.num_rows, self.n
            d = torch.full(shape, math.nan, dtype=torch.float64, device=self.device)
            for group, rows in self.group_rows.items():
                a, b = self.operands_of(group)
                d[torch.tensor(rows, device=self.device)] = gemm_nt_f64(*a, *b)
            self._oracle = d[self.is_computed]
        return self._oracle

    def use_alignment(self) -> None:
        if settings.mk_alignment != self.alignment:
            deep_gemm.set_mk_alignment_for_contiguous_layout(self.alignment)

    def call(self, d: torch.Tensor, **options: Any) -> None:
        """The public function of this layout."""
        self.use_alignment()
        if self.kind == "masked":
            options = {"expected_m": max(1, self.rows // 2)} | options
            deep_gemm.m_grouped_fp8_gemm_nt_masked(self.a, self.b, d, self.layout, **options)
        else:
            options = {"use_psum_layout": self.kind == "psum"} | options
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(self.a, self.b, d, self.layout, **options)

    def check_rows(self, d: torch.Tensor, ensure_zero_padding: bool = True) -> None:
        """Hold every row of D [all rows, n], which was full of `POISON`, against its state."""
        bits = d.view(torch.int16)
        untouched = self.states == UNTOUCHED if ensure_zero_padding else ~self.is_computed
        self._check_bits(bits, untouched, POISON, "was written, expected to be left alone")
        if ensure_zero_padding:
            self._check_bits(bits, self.states == ZERO, 0, "is not all zero bits")
        computed = d[self.is_computed]
        compare(computed, self.oracle(), **limits(*computed.shape), name=f"computed rows of {self}")

    def _check_bits(self, bits: torch.Tensor, rows: torch.Tensor, value: int, what: str) -> None:
        wrong = (bits != value).any(dim=1) & rows
        assert not wrong.any(), (
            f"{self}: {int(wrong.sum())} of {int(rows.sum())} rows, the first of them row "
            f"{int(wrong.int().argmax())}, {what}"
        )

    def __repr__(self) -> str:
        return (
            f"{self.kind} with {self.num_groups} groups, rows={self.rows}, n={self.n}, k={self.k}, "
            f"alignment={self.alignment}"
        )


def _native_groups(sfa: torch.Tensor) -> torch.Tensor:
    """`sfa` [groups, m, k-blocks] as native scales, with NaN in the gaps and behind."""
    groups, m, k_blocks = sfa.shape
    aligned = align(m, 4)
    size = groups * k_blocks * aligned
    buffer = torch.full((size + 256,), math.nan, dtype=torch.float32, device=sfa.device)
    view = buffer[:size].view(groups, k_blocks, aligned)[:, :, :m]
    view.copy_(sfa.mT)
    return view.mT


def make_case(
    kind: str,
    sizes: Sequence[int],
    n: int,
    k: int,
    *,
    rows: int | None = None,
    wild: bool = True,
    alignment: int = 128,
    fill: str = "normal",
    seed: int = 0,
    device: str = "cuda",
) -> GroupedCase:
    """A case whose groups have these sizes.

    `rows` (psum: of A; masked: of each group) is what is needed, and a random rest, if not given.
    """
    rng = random.Random(seed)
    if kind == "ids":
        values = make_ids(sizes, alignment, rng, wild)
        rows = len(values)
    elif kind == "psum":
        values = make_ends(sizes, alignment, rng)
        least = values[-1] if values else 0
        rows = rows or least + rng.choice([0, 1, alignment // 2, 2 * alignment + 1])
    else:
        values = list(sizes)
        rows = rows or max(1, *sizes) + rng.choice([0, 1, 5])
    options: dict[str, Any] = {"fill": fill, "seed": seed, "device": device}
    case = GroupedCase(kind, len(sizes), rows, n, k, alignment=alignment, **options)
    return case.route(values)


GroupedGemm = Callable[[GroupedCase, torch.Tensor, bool], None]


def planned(case: GroupedCase, d: torch.Tensor, ensure_zero_padding: bool = True) -> None:
    """The public call."""
    if case.kind == "masked":
        case.call(d)
    else:
        case.call(d, ensure_zero_padding=ensure_zero_padding)


def with_config(config: KernelConfig) -> GroupedGemm:
    def run(case: GroupedCase, d: torch.Tensor, ensure_zero_padding: bool = True) -> None:
        case.use_alignment()
        if case.kind == "masked":
            run_masked(case.a, case.b, d, case.layout, config)
        else:
            is_psum = case.kind == "psum"
            run_contiguous(case.a, case.b, d, case.layout, config, is_psum, ensure_zero_padding)

    return run


def check(
    case: GroupedCase, gemm: GroupedGemm = planned, ensure_zero_padding: bool = True
) -> torch.Tensor:
    """Run `gemm` on a guarded D, hold every row against its state; return D [all rows, n]."""
    output = GuardedOutput(case.num_rows, case.n, case.device)
    gemm(case, case.shaped(output.d), ensure_zero_padding)
    output.check_guard()
    case.check_rows(output.d, ensure_zero_padding)
    return output.d


def run(case: GroupedCase, gemm: GroupedGemm = planned, **options: Any) -> torch.Tensor:
    """D [all rows, n], full of `POISON` before `gemm`, unchecked."""
    d = torch.full((case.num_rows, case.n), POISON, dtype=torch.int16, device=case.device)
    d = d.view(torch.bfloat16)
    gemm(case, case.shaped(d), **options)
    return d
