"""The shapes that are measured, and what the peers reached on them (peers/h200.json)."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent / "peers" / "h200.json"


@dataclass(frozen=True, order=True)
class Case:
    """D[m, n] = A[m, k] @ B[n, k].T"""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Bytes that any kernel moves: operands, their scales, and D in bf16."""
        k_blocks = -(-self.k // 128)
        scales = 4 * k_blocks * (self.m + -(-self.n // 128))
        return (self.m + self.n) * self.k + scales + 2 * self.m * self.n

    @property
    def size_class(self) -> str:
        return "decode" if self.m <= 64 else "mid" if self.m <= 512 else "large"


YARDSTICK = Case(4096, 4096, 7168)


@functools.cache
def peers() -> Any:
    """The peers' figures, as measured once on an H200."""
    return json.loads(PEERS.read_text())


def peer_row(suite: str, case: Case) -> dict[str, float]:
    """The peers' row of a suite ("dense", "sustained_tflops"), or {} where there is none."""
    rows = peers()[suite]
    return next((row for row in rows if (row["m"], row["n"], row["k"]) == _key(case)), {})


def dense_cases(patterns: str | None = None) -> list[Case]:
    """All dense shapes of the peers' table, or those that match.

    `patterns` are shapes MxNxK separated by commas, in which * and ? are wildcards
    ("4096x*x7168,1x*"). A shape without wildcards need not be in the table.

    Raises:
        ValueError: a pattern matches nothing.
    """
    return _select([Case(row["m"], row["n"], row["k"]) for row in peers()["dense"]], patterns)


def sustained_cases(patterns: str | None = None) -> list[Case]:
    """The shapes of the sustained mode, selected likewise."""
    rows = peers()["sustained_tflops"]
    return _select([Case(row["m"], row["n"], row["k"]) for row in rows], patterns)


def by_weight(cases: Iterable[Case]) -> dict[tuple[int, int], list[Case]]:
    """Cases grouped by (n, k): those share one quantised weight."""
    groups: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.n, case.k), []).append(case)
    return groups


def _select(cases: list[Case], patterns: str | None) -> list[Case]:
    if patterns is None:
        return cases
    selected: list[Case] = []
    for pattern in patterns.split(","):
        matches = [case for case in cases if fnmatchcase(str(case), pattern.strip())]
        if not matches:
            matches = [_parse(pattern.strip(), cases)]
        selected += [case for case in matches if case not in selected]
    return selected


def _parse(text: str, cases: list[Case]) -> Case:
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdigit() for size in sizes):
        raise ValueError(
            f"shapes: {text!r} is no shape MxNxK and matches none of the {len(cases)} in the table"
        )
    return Case(*map(int, sizes))


def _key(case: Case) -> tuple[int, int, int]:
    return case.m, case.n, case.k
