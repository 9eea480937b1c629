"""Time explicit kernel configs on each grouped case: where the cost model's numbers come from.

    python -m benchmarks.grouped_search --shapes 'masked,psum 32x*' --out sweep.json

The result file: {"meta", "configs": [...], "rows": [{"layout", "groups", "m_per_group", "n", "k",
"tokens", "us": {index of config: median microseconds}}]}. A config that fails on a case, or is
wrong, is named and has no time there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import search
from benchmarks.dense import TimerLike
from benchmarks.grouped_cases import Data, GroupedCase, Operands, aligned, by_family, grouped_cases
from benchmarks.results import make_meta
from benchmarks.timing import Timer
from deep_gemm import grouped_gemm, plan
from deep_gemm.types import KernelConfig

REPEATS = 5
BLOCK_NS = (16, 32, 48, 64, 96, 128, 160, 192)

Save = Callable[[list[dict[str, Any]]], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", help="as of the grouped suite: words with wildcards")
    parser.add_argument("--configs", type=Path, help="JSON list of make_config's arguments")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed calls of each")
    parser.add_argument("--commit", help="commit to note, where git cannot tell")
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    options = parser.parse_args()
    cases = grouped_cases(options.shapes)
    configs = search.compiled(load_configs(options.configs) if options.configs else grid())
    command = shlex.join(["python", "-m", "benchmarks.grouped_search", *sys.argv[1:]])
    meta = make_meta(command, None, options.commit)

    def save(rows: list[dict[str, Any]]) -> None:
        described = [asdict(config) for config in configs]
        table = {"meta": meta, "configs": described, "rows": rows}
        options.out.write_text(json.dumps(table, indent=1))

    sweep(cases, configs, Timer(), save, options.repeats)


def grid() -> list[KernelConfig]:
    """Tiles of the dense search, on one group's rows each: no clusters along M."""
    return [
        _grouped(
            block_m=each.block_m,
            block_n=each.block_n,
            num_consumers=each.num_consumers,
            cluster_n=each.cluster_n,
            num_partials=each.num_partials,
        )
        for each in search.grid()
        if each.cluster_m == 1
        and each.block_m <= plan.GROUPED_BLOCK_M
        and each.block_n in BLOCK_NS
        and (each.cluster_n == 1 or each.block_m > 64)
    ]


def load_configs(path: Path) -> list[KernelConfig]:
    """A list of objects with `KernelConfig`'s fields, or of `make_config`'s arguments."""
    return load_configs_of(json.loads(path.read_text()))


def load_configs_of(objects: Sequence[dict[str, Any]]) -> list[KernelConfig]:
    """The configs that such objects describe, all of them grouped."""
    return [_grouped(**each) for each in objects]


def _grouped(**values: Any) -> KernelConfig:
    values["is_grouped"] = True
    return KernelConfig(**values) if "num_d_slabs" in values else plan.make_config(**values)


def sweep(
    cases: Sequence[GroupedCase],
    configs: Sequence[KernelConfig],
    timer: TimerLike,
    save: Save = lambda rows: None,
    repeats: int = REPEATS,
    device: str = "cuda",
) -> list[dict[str, Any]]:
    """A row for each case; `save` gets all rows so far after each."""
    rows = []
    for family, members in by_family(cases).items():
        data = Data(family, device)
        for case in members:
            operands = Operands(case, data)
            with aligned(case):
                us = times(operands, configs, timer, repeats)
            best = min(us, key=lambda index: us[index], default=None)
            print(case, *(f"{us[best]:.1f} us {configs[best]}",) if best is not None else ())
            rows.append(
                {
                    "layout": case.layout,
                    **asdict(family),
                    "tokens": case.tokens,
                    "us": {str(index): time for index, time in us.items()},
                }
            )
            save(rows)
    return rows


def times(
    operands: Operands, configs: Sequence[KernelConfig], timer: TimerLike, repeats: int
) -> dict[int, float]:
    """Median microseconds of each config that is right, in one session, in turn."""
    expected = operands.data.expected.float()
    calls: dict[int, Callable[[], None]] = {}
    for index, config in enumerate(configs):
        call = partial(run, operands, config)
        try:
            error = float((operands.results(call).float() - expected).norm() / expected.norm())
            problem = "" if error <= search.MAX_ERROR else f"relative error {error:.2e}"
        except (RuntimeError, ValueError, AssertionError) as failure:
            problem = str(failure).splitlines()[0]
        if problem:
            print(f"left out on {operands.case}: {config}: {problem}")
        else:
            calls[index] = call
    if not calls:
        return {}
    with timer.session() as session:
        measurement = session.measure(list(calls.values()), repeats)
    return {
        index: round(figures.us, 3)
        for index, figures in zip(calls, measurement.figures, strict=True)
    }


def run(operands: Operands, config: KernelConfig) -> None:
    """The grouped call of the operands' layout with an explicit config."""
    if operands.case.layout == "masked":
        grouped_gemm.run_masked(
            operands.a, operands.b, operands.d, operands.grouped_layout, config,
            expected_m=operands.case.family.m_per_group,
        )  # fmt: skip
    else:
        grouped_gemm.run_contiguous(
            operands.a,
            operands.b,
            operands.d,
            operands.grouped_layout,
            config,
            use_psum_layout=operands.case.layout == "psum",
            expected_m=operands.case.family.m_per_group,
        )


if __name__ == "__main__":
    main()
