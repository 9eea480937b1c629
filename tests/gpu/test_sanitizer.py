"""compute-sanitizer over `sanitize*.py`: memcheck, initcheck and synccheck have to be clean.

racecheck is reported only: what it knows of TMA and of mbarriers is partial, so that it can warn of
accesses that these order.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

FOLDER = Path(__file__).parent
SCRIPTS = ["sanitize.py", "sanitize_grouped.py"]
TOOLS = ["memcheck", "initcheck", "synccheck", "racecheck"]
SECONDS = 170
ERRORS_FOUND = 77  # an exit status that Python itself does not use


def find_sanitizer() -> str | None:
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    candidates = ["compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"]
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            candidates.append(os.path.join(os.environ[name], "bin", "compute-sanitizer"))
    for folder in folders:
        candidates += glob.glob(f"{folder}/**/compute-sanitizer", recursive=True)
    return next(filter(None, map(shutil.which, candidates)), None)


@pytest.fixture(scope="module")
def sanitizers() -> Iterator[dict[tuple[str, str], subprocess.Popen[str]]]:
    """Every tool at work, side by side: most of their time is spent on the host."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed (it is part of the CUDA toolkit)")
    # cuda-bindings asks the driver for functions of every version; those it lacks are no errors
    options = ["--error-exitcode", str(ERRORS_FOUND), "--print-limit", "20"]
    options += ["--report-api-errors", "no"]
    processes = {
        (script, tool): subprocess.Popen(
            [sanitizer, "--tool", tool, *options, sys.executable, str(FOLDER / script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for script in SCRIPTS
        for tool in TOOLS
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_sanitizer(
    script: str, tool: str, sanitizers: dict[tuple[str, str], subprocess.Popen[str]]
) -> None:
    process = sanitizers[script, tool]
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"{tool} took more than {SECONDS} s:\n{output[-3000:]}")
    if tool == "racecheck" and process.returncode == ERRORS_FOUND:
        print(output)
        pytest.skip(f"racecheck reports: {output.strip().splitlines()[-1]}")
    assert process.returncode == 0, output[-6000:]
    assert "GEMMs are right" in output, output[-3000:]
