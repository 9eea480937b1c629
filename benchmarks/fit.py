"""Fit the cost model of `deep_gemm/plan.py` to measured times, and tell how well it chooses.

    python -m benchmarks.fit            # how good are the numbers in plan.py?
    python -m benchmarks.fit --refit    # find new ones, print them as plan.py has them

The table, benchmarks/results/h200_search.json, has the median kernel time of many configs on every
shape: {"meta", "configs": [...], "rows": [{"m", "n", "k", "us": {index of config: microseconds}}]}.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import RESULTS, geomean
from deep_gemm.plan import CANDIDATES, COST_MODEL, Candidate, CostModel, Work, work_of
from deep_gemm.types import KernelConfig, Problem

TABLE = RESULTS / "h200_search.json"
NUM_SMS = 132
STEPS = 30_000


@dataclass(frozen=True)
class Sample:
    """One shape: the time of every config that was tried on it."""

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
        m, n, k = row["m"], row["n"], row["k"]
        problem = Problem("dense", m, n, k, "cuda:0", k, k, n, (-(-k // 128), 1))
        us = {configs[int(index)]: time for index, time in row["us"].items()}
        samples.append(Sample(problem, us))
    return samples


def regrets(
    samples: Sequence[Sample], model: CostModel, candidates: Sequence[Candidate]
) -> list[float]:
    """For each shape, the time of the candidate that the model chooses over the best of all."""
    found = []
    for sample in samples:
        tried = [each for each in candidates if each.config in sample.us]
        works = [work_of(sample.problem, each.config, NUM_SMS) for each in tried]
        times = [
            model.time_us(work, each.k_block_us, each.tile_us)
            for work, each in zip(works, tried, strict=True)
        ]
        found.append(sample.us[tried[int(np.argmin(times))].config] / sample.best_us)
    return found


def refit(
    samples: Sequence[Sample], candidates: Sequence[Candidate], steps: int = STEPS, seed: int = 0
) -> tuple[CostModel, list[Candidate]]:
    """Numbers with the least squared error of the logarithm of time, found by random steps.

    Times near the best of their shape weigh most: only they decide a choice.
    """
    launches = [
        (work_of(sample.problem, each.config, NUM_SMS), index, sample.us[each.config], sample)
        for sample in samples
        for index, each in enumerate(candidates)
        if each.config in sample.us
    ]
    columns = {
        field.name: np.array([getattr(work, field.name) for work, *_ in launches], float)
        for field in fields(Work)
    }
    works, owner = Work(**columns), np.array([index for _, index, *_ in launches])
    us = np.array([time for *_, time, _ in launches])
    weight = np.array([(sample.best_us / time) ** 6 for *_, time, sample in launches])

    def unpack(x: Any) -> tuple[CostModel, Any, Any]:
        return CostModel(*x[:4]), x[4 : 4 + len(candidates)], x[4 + len(candidates) :]

    def error(x: Any) -> float:
        model, k_block_us, tile_us = unpack(x)
        off = np.log(model.time_us(works, k_block_us[owner], tile_us[owner]) / us)
        return float((weight * off**2).sum() / weight.sum())

    rng = np.random.default_rng(seed)
    start = [getattr(COST_MODEL, field.name) for field in fields(CostModel)]
    start += [each.k_block_us for each in candidates] + [each.tile_us for each in candidates]
    best, least = np.array(start), error(np.array(start))
    for step in range(steps):
        size = 0.15 * 0.6 ** (5 * step // steps)
        changed = best * np.exp(rng.normal(0, size, len(best)) * (rng.random(len(best)) < 0.12))
        if (now := error(changed)) < least:
            best, least = changed, now
    model, k_block_us, tile_us = unpack(best)
    fitted = [
        Candidate(each.config, round(float(a), 4), round(float(b), 3))
        for each, a, b in zip(candidates, k_block_us, tile_us, strict=True)
    ]
    return model, fitted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--refit", action="store_true", help="find new numbers and print them")
    options = parser.parse_args()
    samples = load(options.table)
    model, candidates = COST_MODEL, list(CANDIDATES)
    if options.refit:
        model, candidates = refit(samples, candidates)
        print(model, *candidates, sep="\n")
    found = regrets(samples, model, candidates)
    print(f"chosen over best: {geomean(found):.4f} in geomean, {max(found):.3f} at worst")


if __name__ == "__main__":
    main()
