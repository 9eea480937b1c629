"""Roofline and ratio chart of a dense result file, as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases import Case, peer_row, peers
from benchmarks.results import Row, geomean

DENSE_TFLOPS = 1979  # FP8 peak of the datasheet, H100 and H200 SXM
COLOURS = {"decode": "tab:orange", "mid": "tab:green", "large": "tab:blue"}


def plot(rows: list[Row], folder: Path, title: str) -> list[Path]:
    """Write roofline.png and ratios.png for dense rows; returns their paths."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in (("roofline.png", _roofline), ("ratios.png", _ratios)):
        figure, axes = pyplot.subplots(figsize=(11, 5.5), layout="constrained")
        draw(axes, rows)
        axes.set_title(title)
        figure.savefig(folder / name, dpi=130)
        pyplot.close(figure)
        paths.append(folder / name)
    return paths


def _roofline(axes: Any, rows: list[Row]) -> None:
    """TFLOPS over operations per byte, under what the memory and the tensor cores allow."""
    tb_per_s = peers()["ceilings"]["tma_read_gb_per_s"] / 1e3
    knee = DENSE_TFLOPS / tb_per_s
    axes.plot([1, knee, 1e5], [tb_per_s, DENSE_TFLOPS, DENSE_TFLOPS], color="black", lw=1)
    for marker, column, label in (("x", "cublaslt_tensor_us", "torch._scaled_mm"), ("o", "us", "")):
        for name, colour in COLOURS.items():
            points = [
                (case.flops / case.bytes, case.flops / row[column] / 1e6)
                for row, case in _cases(rows)
                if case.size_class == name and row[column]
            ]
            axes.scatter(
                *zip(*points, strict=True) if points else ((), ()),
                marker=marker,
                s=28,
                color=colour,
                alpha=0.8 if marker == "o" else 0.5,
                label=f"{label or 'ours'}, {name}",
            )
    axes.set(xscale="log", yscale="log", xlim=(1, 1e4), ylim=(1, 3000))
    axes.set(xlabel="FLOP per byte", ylabel="TFLOPS")
    axes.text(1.2, tb_per_s * 1.6, f"{tb_per_s:.2f} TB/s read, measured", rotation=33, fontsize=8)
    axes.text(2200, DENSE_TFLOPS * 1.06, "1979 TFLOPS, datasheet", fontsize=8)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, ncols=2)


def _ratios(axes: Any, rows: list[Row]) -> None:
    """Time over that of `torch._scaled_mm`, per shape: ours, and the peers' figures."""
    rows = sorted(rows, key=lambda row: (row["n"] * row["k"], row["n"], row["m"]))
    cases = _cases(rows)
    series = {"ours": [row["ratio_to_tensor"] for row in rows]}
    series["cuBLASLt, block scales"] = [
        _over(row["cublaslt_block_us"], row["cublaslt_tensor_us"]) for row in rows
    ]
    series["DeepGEMM (its own run)"] = [
        _over(peer.get("deepgemm_us"), peer.get("cublaslt_tensor_us"))
        for peer in (peer_row("dense", case) for _, case in cases)
    ]
    places = range(len(rows))
    styles = ("o", "tab:blue"), ("+", "tab:green"), ("x", "tab:orange")
    for (name, values), (marker, colour) in zip(series.items(), styles, strict=True):
        known = [value for value in values if value is not None]
        if known:
            label = f"{name}: geomean {geomean(known):.2f}"
            axes.plot(places, values, marker, ms=6, color=colour, label=label)
    axes.axhline(1, color="black", lw=1)
    axes.set_xticks(places, [str(case) for _, case in cases], rotation=90, fontsize=6)
    axes.set(ylabel="time / time of torch._scaled_mm", yscale="log")
    ticks = (0.5, 0.7, 1, 1.4, 2, 3)
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _cases(rows: list[Row]) -> list[tuple[Row, Case]]:
    return [(row, Case(row["m"], row["n"], row["k"])) for row in rows]


def _over(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None
