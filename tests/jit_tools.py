"""Shared by the tests of `deep_gemm.jit`: small kernels, subprocesses without torch, NVRTC 12."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import deep_gemm
from deep_gemm.jit import codegen

PACKAGE = Path(deep_gemm.__file__).parent

_HEADER = """\
#pragma once
{includes}
struct {name}_args {{ volatile int* data; }};

template <class Config>
__host__ __device__ constexpr int {name}_threads() {{ return {threads}; }}

template <class Config>
__device__ void {name}_body(const {name}_args& args) {{
{body}
}}
"""

BODIES = {
    "fill": "    args.data[threadIdx.x] = fill_value(Config::VALUE);",
    # 1024 threads leave each of them 64 registers.
    "spill": """\
    int value[100];
#pragma unroll
    for (int i = 0; i < 100; ++i) value[i] = args.data[i];
#pragma unroll
    for (int i = 0; i < 100; ++i) args.data[i] = value[99 - i];""",
    "indexed": """\
    int value[64];
    for (int i = 0; i < 64; ++i) value[args.data[i]] = i;
    args.data[0] = value[args.data[1]];""",
    # The accumulator is used between wgmmas that have not been waited for.
    "serialised": """\
    const unsigned long long descriptor = args.data[2];
    float d[4] = {};
    for (int i = 0; i < 2; ++i) {
        asm volatile(
            "{\\n.reg .pred accumulate;\\nsetp.ne.b32 accumulate, 1, 0;\\n"
            "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
            "{%0, %1, %2, %3}, %4, %4, accumulate, 1, 1;\\n}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(descriptor));
        d[0] += 1;
    }
    args.data[0] = d[0] + d[1];""",
    "wrong": "    args.data[0] = undeclared;",
}


def write_kernels(root: Path) -> Path:
    """Fill `root` with the headers of `BODIES`; "fill" includes one that includes another."""
    (root / "parts").mkdir(parents=True)
    for name, body in BODIES.items():
        includes = '#include "parts/value.cuh"\n' if name == "fill" else ""
        threads = 1024 if name == "spill" else 128
        text = _HEADER.format(name=name, includes=includes, threads=threads, body=body)
        (root / f"{name}.cuh").write_text(text)
    (root / "parts" / "value.cuh").write_text(
        '#pragma once\n#include "parts/offset.cuh"\n'
        "__device__ inline int fill_value(int value) { return value + OFFSET; }\n"
    )
    (root / "parts" / "offset.cuh").write_text("#pragma once\n#define OFFSET 1000\n")
    return root


def start_python(code: str, **environment: str) -> subprocess.Popen[str]:
    """Run `code` in a fresh interpreter where `deep_gemm.jit` can be imported without torch."""
    prelude = (
        "import sys, types\n"
        "package = types.ModuleType('deep_gemm')\n"
        f"package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['deep_gemm'] = package\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(code: str, **environment: str) -> str:
    """What `code` prints, run as by `start_python`; the test fails if it does."""
    process = start_python(code, **environment)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


def nvrtc_12() -> Callable[[codegen.KernelSource, tuple[str, ...]], tuple[bytes, str]] | None:
    """A compiler, (source, options) -> (cubin, log), by the NVRTC of CUDA 12; None without one.

    The bindings serve one major version only, hence ctypes.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    found = [path for root in roots for path in glob.glob(f"{root}/cuda_nvrtc/lib/libnvrtc.so.12")]
    if not found:
        return None
    for builtins in glob.glob(os.path.join(os.path.dirname(found[0]), "libnvrtc-builtins.so.*")):
        ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)  # NVRTC does not find it by itself
    library = ctypes.CDLL(found[0])

    def strings(texts: list[str]) -> ctypes.Array[ctypes.c_char_p]:
        return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))

    def output(program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(library, f"nvrtcGet{what}")(program, buffer) == 0
        return buffer.raw

    def compile_source(source: codegen.KernelSource, options: tuple[str, ...]) -> tuple[bytes, str]:
        program = ctypes.c_void_p()
        names = strings([name for name, _ in source.headers])
        texts = strings([text for _, text in source.headers])
        status = library.nvrtcCreateProgram(
            ctypes.byref(program), source.text.encode(), b"kernel.cu", len(names), texts, names
        )
        assert status == 0
        status = library.nvrtcCompileProgram(program, len(options), strings(list(options)))
        log = output(program, "ProgramLog").rstrip(b"\0").decode()
        assert status == 0, log
        cubin = output(program, "CUBIN")
        library.nvrtcDestroyProgram(ctypes.byref(program))
        return cubin, log

    return compile_source
