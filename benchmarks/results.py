"""The result files: benchmarks/results/h200_<suite>.json, one format for every suite.

`ratio_to_tensor` is our time over `torch._scaled_mm`'s of the same run (T: below 1 we are faster);
`ratio_to_deepgemm` is DeepGEMM's time over ours, each in units of its own run's yardstick (above 1
we are faster). Grouped rows count real rows only, never padding; `floor_us` is the time to read or
write each byte once at 4.55 TB/s, `triton_us` that of a Triton kernel: the peers', scaled by the
yardsticks, or our own, as `triton_source` says. Figures that do not apply are null.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case, peers
from benchmarks.timing import Figures

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIELDS = (
    "op", "layout", "recipe", "m", "n", "k", "groups", "m_per_group", "tokens", "us", "p10_us",
    "p90_us", "tflops", "gb_per_s", "cublaslt_tensor_us", "cublaslt_block_us", "ratio_to_tensor",
    "ratio_to_deepgemm", "sm_mhz", "power_w", "config", "triton_us", "triton_source", "floor_us",
)  # fmt: skip

Row = dict[str, Any]


def make_row(op: str, figures: Figures, **values: Any) -> Row:
    """A row with all fields; `values` fills those that apply.

    Raises:
        TypeError: a value's name is not one of `FIELDS`.
    """
    if unknown := values.keys() - set(FIELDS):
        raise TypeError(f"no fields of a result row: {sorted(unknown)}")
    row: Row = dict.fromkeys(FIELDS)
    row.update(op=op, us=figures.us, p10_us=figures.p10_us, p90_us=figures.p90_us)
    row.update(values)
    return {name: _rounded(value) for name, value in row.items()}


def gemm_row(case: Case, figures: Figures, tensor_us: float | None, **values: Any) -> Row:
    """A row of one dense GEMM, with what follows from its time."""
    return make_row(
        "fp8_gemm_nt",
        figures,
        layout="dense",
        recipe="1,128,128",
        m=case.m,
        n=case.n,
        k=case.k,
        tflops=case.flops / figures.us / 1e6,
        gb_per_s=case.bytes / figures.us / 1e3,
        cublaslt_tensor_us=tensor_us,
        ratio_to_tensor=figures.us / tensor_us if tensor_us else None,
        **values,
    )


def ratio_to_deepgemm(
    deepgemm_us: float | None, us: float, yardstick_us: float | None
) -> float | None:
    """How many times faster than DeepGEMM we are, each measured by its own run's yardstick."""
    if deepgemm_us is None or yardstick_us is None:
        return None
    return deepgemm_us / float(peers()["yardstick_us"]["us"]) / (us / yardstick_us)


def make_meta(command: str, yardstick_us: float | None, commit: str | None = None) -> Row:
    """What a reader needs to judge or repeat a run."""
    on_gpu = torch.cuda.is_available()
    return {
        "commit": commit or _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": command,
        "yardstick_us": _rounded(yardstick_us),
    }


def save(path: Path, meta: Row, rows: list[Row]) -> None:
    """Write a result file, one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{lines}\n]}}\n')


def load(path: Path) -> tuple[Row, list[Row]]:
    """(meta, rows) of a result file."""
    data = json.loads(path.read_text())
    return data["meta"], data["rows"]


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of nothing."""
    logs = list(values)
    return statistics.geometric_mean(logs) if logs else float("nan")


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip().splitlines()[0] if result.stdout.strip() else None
