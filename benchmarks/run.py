"""Run a suite of measurements and keep its result file: `python -m benchmarks.run --help`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import results
from benchmarks.cases import dense_cases, sustained_cases
from benchmarks.results import Row
from benchmarks.table import dense_table, grouped_table

app = typer.Typer(help="Measure this library.", no_args_is_help=True, add_completion=False)
console = Console(highlight=False)
if not console.is_terminal:
    console.width = 180  # a log is not wrapped
HIDDEN = ("layout", "recipe")  # where they are the same in all rows

Shapes = Annotated[
    str | None, typer.Option(help="shapes MxNxK with wildcards, separated by commas")
]
GroupedShapes = Annotated[
    str | None,
    typer.Option(
        "--shapes", help='words with wildcards, such as "masked 32x8 4096x7168", commas between'
    ),
]
Out = Annotated[Path | None, typer.Option(help="result file to write (JSON)")]
Commit = Annotated[str | None, typer.Option(help="commit to note, where git cannot tell")]
PlotFolder = Annotated[
    Path | None, typer.Option("--plot", help="folder for roofline.png and ratios.png")
]
GroupedPlotFolder = Annotated[
    Path | None, typer.Option("--plot", help="folder for grouped_tflops.png")
]
Triton = Annotated[
    bool, typer.Option("--triton/--no-triton", help="measure a Triton kernel where no peer did")
]


@app.command()
def dense(
    shapes: Shapes = None, out: Out = None, commit: Commit = None, plot: PlotFolder = None
) -> None:
    """Kernel time of every shape next to PyTorch's FP8 products."""
    from benchmarks.dense import run_dense
    from benchmarks.timing import Timer

    rows, yardstick_us = run_dense(_cases(dense_cases, shapes), _hopper(Timer), track=track)
    meta = _finish(rows, out, commit, yardstick_us)
    if plot is not None:
        from benchmarks.plots import plot as draw

        title = f"FP8 GEMM, 1x128 by 128x128 scales, {meta['gpu']}, {meta['date']}"
        for path in draw(rows, plot, title):
            console.print(f"wrote {path}")


@app.command()
def grouped(
    shapes: GroupedShapes = None,
    out: Out = None,
    commit: Commit = None,
    plot: GroupedPlotFolder = None,
    triton: Triton = True,
) -> None:
    """Kernel time of the contiguous, masked and prefix-sum layouts next to Triton's."""
    from benchmarks.grouped import run_grouped
    from benchmarks.grouped_cases import grouped_cases
    from benchmarks.timing import Timer

    cases = _cases(grouped_cases, shapes)
    rows, yardstick_us = run_grouped(cases, _hopper(Timer), track=track, triton=triton)
    meta = _finish(rows, out, commit, yardstick_us)
    console.print(grouped_table(meta, rows).split("\n\n")[0])
    if plot is not None:
        from benchmarks.grouped_plots import plot as draw

        title = f"Grouped FP8 GEMM, {meta['gpu']}, {meta['date']}"
        for path in draw(rows, plot, title):
            console.print(f"wrote {path}")


@app.command()
def sustained(shapes: Shapes = None, out: Out = None, commit: Commit = None) -> None:
    """TFLOPS of one second back to back, at the GPU's power limit."""
    from benchmarks.dense import run_sustained
    from benchmarks.timing import Timer

    rows, yardstick_us = run_sustained(_cases(sustained_cases, shapes), _hopper(Timer), track=track)
    _finish(rows, out, commit, yardstick_us)


@app.command()
def host(out: Out = None, commit: Commit = None) -> None:
    """Host time per call next to PyTorch's."""
    from benchmarks.host import run_host

    _finish(_hopper(run_host), out, commit)


@app.command("compile")
def compile_(shapes: Shapes = None, out: Out = None, commit: Commit = None) -> None:
    """Cold compile time of every kernel of the shapes; needs no GPU."""
    from benchmarks.compile import run_compile

    _finish(run_compile(_cases(dense_cases, shapes), track=track), out, commit)


@app.command()
def quantize(out: Out = None, commit: Commit = None) -> None:
    """Bandwidth of the quantisers next to that of a copy."""
    from benchmarks.quantize import run_quantize
    from benchmarks.timing import Timer

    _finish(run_quantize(_hopper(Timer)), out, commit)


def _cases(select: Any, shapes: str | None) -> Any:
    try:
        return select(shapes)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _hopper(make: Any) -> Any:
    """`make()` where there is a Hopper GPU, else an error that says so."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this suite needs a Hopper GPU; torch sees no CUDA device here")
    if torch.cuda.get_device_capability()[0] != 9:
        raise typer.BadParameter(
            f"this suite needs a Hopper GPU; here is a {torch.cuda.get_device_name()}"
        )
    return make()


def _finish(
    rows: list[Row], out: Path | None, commit: str | None, yardstick_us: float | None = None
) -> Row:
    """Print the rows, write the result file, return its meta."""
    columns = {
        name: [_short(row[name]) for row in rows]
        for name in results.FIELDS
        if any(row[name] is not None for row in rows)
        and not (name in HIDDEN and len({row[name] for row in rows}) == 1)
    }
    table = Table(*(name.replace("cublaslt_", "") for name in columns), box=None)
    for values in zip(*columns.values(), strict=True):
        table.add_row(*values)
    console.print(table)
    meta = results.make_meta(shlex.join(["python", *_command()]), yardstick_us, commit)
    if any(row["ratio_to_tensor"] for row in rows if row["op"] == "fp8_gemm_nt"):
        console.print("\n".join(dense_table(meta, rows).splitlines()[:6]))
    if out is not None:
        results.save(out, meta, rows)
        console.print(f"wrote {out}")
    return meta


def _short(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):  # a kernel config
        tile = f"{value['block_m']}x{value['block_n']} {value['num_consumers']}wg"
        return f"{tile} {value['num_stages']}st {value['cluster_m']}x{value['cluster_n']}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _command() -> list[str]:
    arguments = sys.argv[1:]
    if arguments[:1] == ["bench"]:  # called as deep-gemm bench
        arguments = arguments[1:]
    return ["-m", "benchmarks.run", *arguments]


if __name__ == "__main__":
    app()
