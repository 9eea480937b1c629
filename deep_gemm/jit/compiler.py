"""From source to cubin: NVRTC (the default, nothing to install beside the wheels), or nvcc."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from deep_gemm.config import settings, warn_once
from deep_gemm.jit.codegen import KernelSource

ARCH = "sm_90a"
_MIN_NVCC = (12, 3)  # the first that knows all of sm_90a
# The compilers see the same file name always: it ends up in the code.
_FILE = "kernel.cu"
# Remarks of ptxas that mean a kernel of ours is broken, although it would give right results: it
# ignored setmaxnreg (C7508), serialised wgmma (C7510 to C7520), or ran out of registers.
_REFUSED = re.compile(r"\(C75(08|1\d|20)\)|Registers are spilled|Local memory used", re.IGNORECASE)
_Output = Literal["cubin", "ptx"]


class CompileError(RuntimeError):
    """A kernel does not compile, or not as it should; `log` is all that the compiler said."""

    log = ""


class MissingCompilerError(ImportError):
    """NVRTC cannot be loaded; the text says what to install."""


def options() -> tuple[str, ...]:
    """The options for either compiler. They are part of the cache key, and hold no path."""
    flags = [f"--gpu-architecture={ARCH}", f"--std=c++{settings.jit_cpp_standard}"]
    flags.append("--ptxas-options=--warn-on-spills")
    if settings.jit_ptxas_check:
        flags.append("--ptxas-options=--warn-on-local-memory-usage")
    if settings.jit_ptxas_verbose:
        flags.append("--ptxas-options=-v")
    if settings.jit_with_lineinfo:
        flags.append("-lineinfo")
    return tuple(flags)


def compiler_version() -> str:
    """The compiler in force, as in "NVRTC 13.0" or "nvcc 13.0.88"."""
    nvcc = _chosen_nvcc()
    if nvcc is not None:
        return f"nvcc {nvcc[1]}"
    major, minor = _check(_nvrtc().nvrtcVersion(), "nvrtcVersion")
    return f"NVRTC {major}.{minor}"


def compile_cubin(source: KernelSource) -> bytes:
    """The cubin of `source` for sm_90a. Needs neither a GPU nor a driver; releases the GIL.

    Raises:
        CompileError: with the first diagnostic; also when registers spill, wgmma is serialised or
            setmaxnreg is ignored, since the kernel would be slow without a word.
        MissingCompilerError: there is no NVRTC.
    """
    cubin, log = _compile(source, "cubin")
    if settings.jit_ptxas_verbose:
        print(f"deep_gemm: {source.name}: {log.strip()}", file=sys.stderr)
    refused = next((line for line in log.splitlines() if _REFUSED.search(line)), None)
    if refused is not None:
        raise _error(source, refused, log)
    return cubin


def compile_ptx(source: KernelSource) -> str:
    """The PTX of `source`, for people to read."""
    return _compile(source, "ptx")[0].rstrip(b"\0").decode()


def _compile(source: KernelSource, output: _Output) -> tuple[bytes, str]:
    nvcc = _chosen_nvcc()
    if nvcc is not None:
        return _run_nvcc(nvcc[0], source, output)
    return _run_nvrtc(source, output)


def _error(source: KernelSource, diagnostic: str, log: str) -> CompileError:
    error = CompileError(f"{source.name}, {compiler_version()}: {diagnostic.strip()}")
    error.log = log
    return error


def _first_diagnostic(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line)]
    return next(iter(errors or lines), "no diagnostic")


def _print_command(command: Sequence[str]) -> None:
    if settings.jit_print_compiler_command:
        print(f"deep_gemm: {shlex.join(command)}", file=sys.stderr)


# NVRTC


@functools.cache
def _nvrtc() -> Any:
    """The module `cuda.bindings.nvrtc`, after it has found its library."""
    try:
        from cuda.bindings import nvrtc

        _check(nvrtc.nvrtcVersion(), "nvrtcVersion")
    except (ImportError, RuntimeError) as error:
        raise MissingCompilerError(
            f"NVRTC, the run-time compiler of CUDA, cannot be loaded ({error}). Install it in the "
            "major version of your torch and driver: pip install cuda-bindings nvidia-cuda-nvrtc "
            '(CUDA 13), or pip install "cuda-bindings<13" nvidia-cuda-nvrtc-cu12 (CUDA 12)'
        ) from error
    return nvrtc


def _check(result: tuple[Any, ...], what: str) -> Any:
    """As `driver.check`, for NVRTC's statuses: these have names only, and need no driver."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"{what}: {status.name}")
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def _run_nvrtc(source: KernelSource, output: _Output) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    flags = options()
    _print_command([compiler_version(), *flags, _FILE])
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    program = _check(
        nvrtc.nvrtcCreateProgram(source.text.encode(), _FILE.encode(), len(names), texts, names),
        "nvrtcCreateProgram",
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
        log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if int(status) != 0:
            raise _error(source, _first_diagnostic(log or status.name), log)
        return _read(nvrtc, program, output.upper()), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(nvrtc: Any, program: Any, what: str) -> bytes:
    """One of the outputs that NVRTC hands out by a pair of functions, for its size and itself."""
    size = _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program), f"nvrtcGet{what}Size")
    buffer = bytearray(size)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
    return bytes(buffer)


# nvcc


def _chosen_nvcc() -> tuple[str, str] | None:
    """(path, version) of the nvcc to use, None for NVRTC."""
    if settings.jit_use_nvrtc:
        return None
    path = _find_nvcc()
    version = _nvcc_version(path) if path else None
    if path is None or version is None:
        reason = "there is none on PATH or in CUDA_HOME"
    elif tuple(map(int, version.split(".")[:2])) < _MIN_NVCC:
        reason = f"{path} is version {version}, and {'.'.join(map(str, _MIN_NVCC))} is needed"
    else:
        return path, version
    warn_once(f"DG_JIT_USE_NVRTC=0 asks for nvcc, but {reason}; kernels are compiled with NVRTC")
    return None


def _find_nvcc() -> str | None:
    wanted = settings.jit_nvcc_compiler
    if wanted:
        path = shutil.which(wanted)
        if path is None:
            raise ValueError(
                f"DG_JIT_NVCC_COMPILER is {wanted!r}, expected the path of an executable nvcc"
            )
        return path
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    candidates = ["nvcc", *(os.path.join(home, "bin", "nvcc") for home in homes if home)]
    return next(filter(None, map(shutil.which, candidates)), None)


@functools.cache
def _nvcc_version(path: str) -> str | None:
    """Such as "13.0.88"; None where `path` is something else or does not run."""
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return None
    match = re.search(r"\bV(\d+\.\d+\.\d+)", output)
    return match and match[1]


def _run_nvcc(nvcc: str, source: KernelSource, output: _Output) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory(prefix="deep_gemm-") as directory:
        for name, text in ((_FILE, source.text), *source.headers):
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        command = [nvcc, *options(), f"-{output}", "-I.", "-o", output, _FILE]
        _print_command(command)
        result = subprocess.run(command, cwd=directory, capture_output=True, text=True)
        log = result.stdout + result.stderr
        if result.returncode != 0:
            diagnostic = _first_diagnostic(log)
            raise _error(
                source,
                f"exit status {result.returncode} of {shlex.join(command)}: {diagnostic}",
                log,
            )
        return Path(directory, output).read_bytes(), log
