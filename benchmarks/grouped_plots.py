"""Bars of a grouped result file, as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.results import Row

FEW_ROWS = 64  # per group: below, weights are read for so few rows that memory is the limit
BARS = (
    ("ours", "tab:blue"),
    ("ours, prefix sums", "lightskyblue"),
    ("DeepGEMM (its own run)", "tab:orange"),
    ("Triton", "tab:green"),
)


def plot(rows: list[Row], folder: Path, title: str) -> list[Path]:
    """Write grouped_tflops.png; returns its path."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    many = _families([row for row in rows if row["m_per_group"] >= FEW_ROWS])
    few = _families([row for row in rows if row["m_per_group"] < FEW_ROWS])
    folder.mkdir(parents=True, exist_ok=True)
    figure, (top, bottom) = pyplot.subplots(2, figsize=(11, 9), layout="constrained")
    _bars(top, many, [_work(family) for family in many.values()])
    top.set(ylabel="TFLOPS")
    _bars(bottom, few, [100 * _first(family)["floor_us"] for family in few.values()])
    bottom.axhline(100, color="black", lw=1)
    bottom.set(ylabel="% of read speed (4.55 TB/s)")
    top.set_title(title)
    figure.savefig(folder / "grouped_tflops.png", dpi=130)
    pyplot.close(figure)
    return [folder / "grouped_tflops.png"]


def _families(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Rows by layout, for each set of groups and weights."""
    families: dict[str, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: -row["m_per_group"]):
        name = f"{row['groups']}x{row['m_per_group']}\n{row['n']}x{row['k']}"
        families.setdefault(name, {})[row["layout"]] = row
    return families


def _first(family: dict[str, Row]) -> Row:
    """The row of the padded layout where there is one."""
    return next((row for layout, row in family.items() if layout != "psum"), family.get("psum", {}))


def _work(family: dict[str, Row]) -> float:
    """TFLOPS times microseconds."""
    row = _first(family)
    return float(2e-6 * row["tokens"] * row["n"] * row["k"])


def _times(family: dict[str, Row]) -> list[float | None]:
    """Microseconds of each of `BARS`."""
    first, psum = _first(family), family.get("psum", {})
    padded = None if first["layout"] == "psum" else first["us"]
    ratio = first["ratio_to_deepgemm"]
    return [padded, psum.get("us"), ratio and ratio * first["us"], first["triton_us"]]


def _bars(axes: Any, families: dict[str, dict[str, Row]], work: list[float]) -> None:
    """For each family one bar of work per microsecond for each of `BARS` that was measured."""
    width = 0.8 / len(BARS)
    times = [_times(family) for family in families.values()]
    for index, (label, colour) in enumerate(BARS):
        bars = [
            (place + (index - (len(BARS) - 1) / 2) * width, each / us)
            for place, (each, row) in enumerate(zip(work, times, strict=True))
            if (us := row[index])
        ]
        if bars:
            axes.bar(*zip(*bars, strict=True), width=width, color=colour, label=label)
    names = [f"{_first(family)['layout']}\n{name}" for name, family in families.items()]
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    if families:
        axes.legend(fontsize=8, ncols=len(BARS), loc="upper right")
        axes.margins(x=0.01, y=0.15)
