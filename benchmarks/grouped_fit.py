"""Fit the cost model of `deep_gemm/grouped_cost.py` to measured times; tell how well it chooses.

    python -m benchmarks.grouped_fit            # how good are the numbers in grouped_cost.py?
    python -m benchmarks.grouped_fit --refit    # find new ones and print them

The table is what `benchmarks.grouped_search` wrote: the time of many configs on every case.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import RESULTS, geomean
from deep_gemm.grouped_cost import (
    GROUPED_CANDIDATES,
    GROUPED_COST_MODEL,
    GroupedCandidate,
    GroupedCostModel,
    predicted_us,
)
from deep_gemm.types import KernelConfig, Problem

TABLE = RESULTS / "h200_grouped_search.json"
NUM_SMS = 132
STEPS = 4_000


@dataclass(frozen=True)
class Sample:
    """One case: the time of every config that was tried on it."""

    problem: Problem
    us: dict[KernelConfig, float]

    @property
    def best_us(self) -> float:
        return min(self.us.values())


def load(path: Path = TABLE) -> list[Sample]:
    """The measured table."""
    table = json.loads(path.read_text())
    configs = [KernelConfig(**each) for each in table["configs"]]
    samples = []
    for row in table["rows"]:
        n, k, groups, expected_m = (row[name] for name in ("n", "k", "groups", "m_per_group"))
        problem = Problem(
            row["layout"], expected_m, n, k, "cuda:0", k, k, n, (-(-k // 128), 1), groups,
            expected_m,
        )  # fmt: skip
        us = {configs[int(index)]: time for index, time in row["us"].items()}
        samples.append(Sample(problem, us))
    return samples


def regrets(
    samples: Sequence[Sample],
    model: GroupedCostModel = GROUPED_COST_MODEL,
    candidates: Sequence[GroupedCandidate] = GROUPED_CANDIDATES,
) -> list[float]:
    """For each case, the time of the candidate that the model chooses over the best of all."""
    found = []
    for sample in samples:
        tried = [each for each in candidates if each.config in sample.us]
        chosen = min(tried, key=lambda each: predicted_us(sample.problem, each, NUM_SMS, model))
        found.append(sample.us[chosen.config] / sample.best_us)
    return found


def refit(
    samples: Sequence[Sample], steps: int = STEPS, seed: int = 0
) -> tuple[GroupedCostModel, list[GroupedCandidate]]:
    """Numbers with the least squared error of the logarithm of time, found by random steps.

    Times near the best of their case weigh most: only they decide a choice.
    """
    names = [field.name for field in fields(GroupedCostModel)]

    def unpack(x: Any) -> tuple[GroupedCostModel, list[GroupedCandidate]]:
        model = GroupedCostModel(**dict(zip(names, map(float, x), strict=False)))
        numbers: Any = np.reshape(x[len(names) :], (-1, 3))
        return model, [
            GroupedCandidate(each.config, *map(float, row))
            for each, row in zip(GROUPED_CANDIDATES, numbers, strict=True)
        ]

    def error(x: Any) -> float:
        model, candidates = unpack(x)
        total = weights = 0.0
        for sample in samples:
            for each in candidates:
                if (us := sample.us.get(each.config)) is None:
                    continue
                weight = (sample.best_us / us) ** 6
                off = math.log(predicted_us(sample.problem, each, NUM_SMS, model) / us)
                total, weights = total + weight * off**2, weights + weight
        return total / weights

    rng = np.random.default_rng(seed)
    start = [getattr(GROUPED_COST_MODEL, name) for name in names]
    for each in GROUPED_CANDIDATES:
        start += [each.k_block_us, each.tile_us, each.idle_share]
    best = np.array(start)
    least = error(best)
    for step in range(steps):
        size = 0.15 * 0.6 ** (5 * step // steps)
        changed = best * np.exp(rng.normal(0, size, len(best)) * (rng.random(len(best)) < 0.2))
        if (now := error(changed)) < least:
            best, least = changed, now
    return unpack(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--refit", action="store_true", help="find new numbers and print them")
    options = parser.parse_args()
    samples = load(options.table)
    model, candidates = GROUPED_COST_MODEL, list(GROUPED_CANDIDATES)
    if options.refit:
        model, candidates = refit(samples)
        print(model, *candidates, sep="\n")
    found = regrets(samples, model, candidates)
    print(f"regret: geomean {geomean(found):.4f}, worst {max(found):.3f}, cases {len(found)}")


if __name__ == "__main__":
    main()
