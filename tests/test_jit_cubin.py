"""The cubin reader against what ptxas prints and what nvdisasm shows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from jit_tools import nvrtc_12

from deep_gemm.jit import compiler, cubin
from deep_gemm.jit.codegen import KernelSource, make_source

pytest_plugins = ["jit_fixtures"]
pytestmark = pytest.mark.usefixtures("kernels")

needs_nvdisasm = pytest.mark.skipif(
    cubin._nvdisasm() is None, reason="no nvdisasm: pip install nvidia-cuda-nvdisasm"
)
TWO_KERNELS = KernelSource(
    "two",
    """
    extern "C" __global__ void small(int* x) { *x = 1; }
    extern "C" __global__ void __launch_bounds__(1024) large(volatile float* x) {
        float value[90];
    #pragma unroll
        for (int i = 0; i < 90; ++i) value[i] = x[i];
    #pragma unroll
        for (int i = 0; i < 90; ++i) x[i] = value[89 - i];
    }
    """,
    (),
)


def ptxas_says(log: str) -> dict[str, cubin.KernelResources]:
    """Read the log of ``ptxas -v``."""
    pattern = r"Function properties for (\w+)\n.*?(\d+) bytes stack frame.*?Used (\d+) registers"
    found = re.findall(pattern, log, re.DOTALL)
    return {name: cubin.KernelResources(int(used), int(frame)) for name, frame, used in found}


def test_reader_agrees_with_ptxas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_PTXAS_VERBOSE", "1")
    code, log = compiler._compile(TWO_KERNELS, "cubin")
    resources = cubin.kernels(code)
    assert resources == ptxas_says(log)
    assert set(resources) == {"small", "large"}
    assert resources["large"].registers == 64
    assert resources["large"].frame_bytes > 0 == resources["small"].frame_bytes


def test_reader_agrees_with_ptxas_of_cuda_12() -> None:
    compile_source = nvrtc_12()
    if compile_source is None:
        pytest.skip("no NVRTC of CUDA 12: pip install nvidia-cuda-nvrtc-cu12")
    code, log = compile_source(TWO_KERNELS, (*compiler.options(), "--ptxas-options=-v"))
    assert cubin.kernels(code) == ptxas_says(log) != {}


@pytest.mark.parametrize("size", [0, 3, 63, 64, 500, 2000])
def test_damaged_file_is_an_error(size: int) -> None:
    code = compiler.compile_cubin(make_source("fill", {"VALUE": 7}))
    with pytest.raises(ValueError, match="not a cubin, or a damaged one"):
        cubin.kernels(code[:size])


def test_other_files_are_an_error() -> None:
    with pytest.raises(ValueError, match="not a cubin"):
        cubin.kernels(Path(subprocess.__file__).read_bytes())


@needs_nvdisasm
def test_opcode_counts() -> None:
    code, _ = compiler._compile(TWO_KERNELS, "cubin")
    counts = cubin.opcode_counts(cubin.disassemble(code))
    assert counts["LDG"] == 90
    assert counts["STG"] == 91
    assert counts["LDL"] == counts["STL"] > 0
    assert counts["QGMMA"] == 0


def test_opcodes_are_found_behind_predicates() -> None:
    sass = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/             @!UPT UIADD3 URZ, URZ, URZ, URZ ;
        /*0030*/              @UP1 UTMALDG.2D.MULTICAST [UR16], [UR4], UR6 ;
        /*1b10*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR20], RZ, !UPT ;
        /*1b20*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR20], R24 ;
    """
    expected = {"LDC": 1, "BRA": 1, "UIADD3": 1, "UTMALDG": 1, "QGMMA": 2}
    assert cubin.opcode_counts(sass) == expected


def test_missing_nvdisasm_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "_nvdisasm", lambda: None)
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-nvdisasm"):
        cubin.disassemble(b"")
