"""Generated source, NVRTC and nvcc, and the remarks of ptxas that are errors."""

from __future__ import annotations

import shutil
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from jit_tools import PACKAGE, nvrtc_12, write_kernels

from deep_gemm.jit import compiler, cubin
from deep_gemm.jit.codegen import KernelSource, make_source
from deep_gemm.jit.compiler import CompileError, MissingCompilerError, compile_cubin
from deep_gemm.types import KernelConfig

pytest_plugins = ["jit_fixtures"]

GEMM = make_source(
    "fp8_gemm_1d2d",
    KernelConfig(block_m=128, block_n=128, num_consumers=2, num_stages=5).constants(),
)
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
both_compilers = pytest.mark.parametrize(
    "use_nvrtc", ["1", pytest.param("0", marks=needs_nvcc)], ids=["nvrtc", "nvcc"]
)


@pytest.fixture(autouse=True)
def fresh(kernels: Path) -> Iterator[None]:
    compiler._nvrtc.cache_clear()
    yield
    compiler._nvrtc.cache_clear()


# Source


def test_source_text() -> None:
    source = make_source("fill", {"VALUE": 7, "IS_FAST": True, "SLOW": False})
    assert source.text.split("\n", 1)[1] == (
        '#include "fill.cuh"\n\n'
        "struct Config {\n"
        "    static constexpr int VALUE = 7;\n"
        "    static constexpr bool IS_FAST = true;\n"
        "    static constexpr bool SLOW = false;\n"
        "};\n\n"
        'extern "C" __global__ void __launch_bounds__(fill_threads<Config>(), 1)\n'
        "fill(const __grid_constant__ fill_args args) {\n"
        "    fill_body<Config>(args);\n"
        "}\n"
    )


def test_source_holds_the_headers_that_it_reaches() -> None:
    names = [name for name, _ in make_source("fill", {"VALUE": 7}).headers]
    assert names == ["fill.cuh", "parts/value.cuh", "parts/offset.cuh"]
    assert [name for name, _ in make_source("spill", {}).headers] == ["spill.cuh"]


def test_every_shipped_kernel_includes_only_shipped_headers() -> None:
    names = [path.stem for path in (PACKAGE / "kernels").glob("*.cuh")]
    assert "fp8_gemm_1d2d" in names
    for name in names:
        make_source(name, {}, PACKAGE / "kernels")


@pytest.mark.parametrize(
    ("constants", "error", "text"),
    [
        ({"VALUE": 1.5}, TypeError, "constant VALUE is 1.5, expected an int or a bool"),
        ({"VALUE": 2**31}, ValueError, "expected a 32-bit integer"),
        ({"A B": 1}, ValueError, "'A B' is not a C\\+\\+ name"),
    ],
)
def test_bad_constant(constants: dict[str, int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make_source("fill", constants)


def test_missing_header() -> None:
    with pytest.raises(FileNotFoundError, match=r"no_such_kernel\.cuh"):
        make_source("no_such_kernel", {})


# Compilers


@both_compilers
def test_compiles_to_a_cubin(use_nvrtc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", use_nvrtc)
    code = compile_cubin(make_source("fill", {"VALUE": 7}))
    assert list(cubin.kernels(code)) == ["fill"]
    assert compiler.compiler_version().startswith("NVRTC" if use_nvrtc == "1" else "nvcc")


def test_nvrtc_is_deterministic_wherever_the_headers_are(tmp_path: Path) -> None:
    elsewhere = write_kernels(tmp_path / "elsewhere")
    first = compile_cubin(make_source("fill", {"VALUE": 7}))
    assert compile_cubin(make_source("fill", {"VALUE": 7}, elsewhere)) == first
    assert compile_cubin(make_source("fill", {"VALUE": 8})) != first


@both_compilers
def test_gemm_kernel_compiles_without_spills(
    use_nvrtc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", use_nvrtc)
    monkeypatch.setenv("DG_JIT_PTXAS_CHECK", "1")
    resources = cubin.kernels(compile_cubin(GEMM))["fp8_gemm_1d2d"]
    assert resources.registers == 168  # 64K registers / 384 threads, in steps of 8
    assert resources.frame_bytes == 0


def test_gemm_kernel_compiles_with_cuda_12() -> None:
    compile_source = nvrtc_12()
    if compile_source is None:
        pytest.skip("no NVRTC of CUDA 12: pip install nvidia-cuda-nvrtc-cu12")
    code, log = compile_source(GEMM, compiler.options())
    resources = cubin.kernels(code)["fp8_gemm_1d2d"]
    assert (resources.registers, resources.frame_bytes) == (168, 0)
    assert compiler._REFUSED.search(log) is None, log


@both_compilers
def test_ptx(use_nvrtc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", use_nvrtc)
    text = compiler.compile_ptx(make_source("fill", {"VALUE": 7}))
    assert ".target sm_90a" in text
    assert "\0" not in text


def test_options_follow_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler.options()[:2] == ("--gpu-architecture=sm_90a", "--std=c++17")
    monkeypatch.setenv("DG_JIT_CPP_STANDARD", "20")
    monkeypatch.setenv("DG_JIT_WITH_LINEINFO", "1")
    monkeypatch.setenv("DG_JIT_PTXAS_VERBOSE", "1")
    assert {"--std=c++20", "-lineinfo", "--ptxas-options=-v"} <= set(compiler.options())
    compile_cubin(make_source("fill", {"VALUE": 7}))


def test_verbose_and_command_go_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DG_JIT_PTXAS_VERBOSE", "1")
    monkeypatch.setenv("DG_JIT_PRINT_COMPILER_COMMAND", "1")
    compile_cubin(make_source("fill", {"VALUE": 7}))
    printed = capsys.readouterr()
    assert "--gpu-architecture=sm_90a" in printed.err
    assert "0 bytes spill stores" in printed.err
    assert printed.out == ""


# Errors


@both_compilers
def test_compile_error_gives_the_first_diagnostic(
    use_nvrtc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", use_nvrtc)
    with pytest.raises(CompileError, match=r'wrong\.cuh\(\d+\): error: .*"undeclared"') as caught:
        compile_cubin(make_source("wrong", {}))
    assert str(caught.value).startswith(f"wrong, {compiler.compiler_version()}: ")
    assert "1 error detected" in caught.value.log


@both_compilers
@pytest.mark.parametrize(
    ("name", "remark"),
    [("spill", "Registers are spilled to local memory"), ("serialised", r"\(C75\d\d\)")],
)
def test_slow_code_is_an_error(
    name: str, remark: str, use_nvrtc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", use_nvrtc)
    with pytest.raises(CompileError, match=f"^{name}, .*{remark}"):
        compile_cubin(make_source(name, {}))


def test_ignored_setmaxnreg_is_an_error() -> None:
    text = 'extern "C" __global__ void f() { asm("setmaxnreg.inc.sync.aligned.u32 64;"); }'
    with pytest.raises(CompileError, match=r"\(C7508\).*setmaxnreg"):
        compile_cubin(KernelSource("f", text, ()))


def test_ptxas_check_also_refuses_indexed_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source("indexed", {})
    assert cubin.kernels(compile_cubin(source))["indexed"].frame_bytes == 256
    monkeypatch.setenv("DG_JIT_PTXAS_CHECK", "1")
    with pytest.raises(CompileError, match="Local memory used"):
        compile_cubin(source)


@pytest.mark.parametrize("code", [7508, 7510, 7514, 7519, 7520])
def test_refused_remarks(code: int) -> None:
    assert compiler._REFUSED.search(f"ptxas info : (C{code}) Potential Performance Loss: ...")


@pytest.mark.parametrize("code", [7507, 7509, 7521, 75100])
def test_other_remarks_pass(code: int) -> None:
    assert not compiler._REFUSED.search(f"ptxas info : (C{code}) something else")


def test_missing_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def fail() -> None:
        raise RuntimeError("Failed to dlopen libnvrtc.so.13")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", fail)
    with pytest.raises(MissingCompilerError, match="Failed to dlopen") as caught:
        compile_cubin(make_source("fill", {"VALUE": 7}))
    assert "pip install cuda-bindings nvidia-cuda-nvrtc (CUDA 13)" in str(caught.value)
    assert isinstance(caught.value, ImportError)


def test_missing_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.bindings

    monkeypatch.delattr(cuda.bindings, "nvrtc", raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(MissingCompilerError, match="pip install cuda-bindings"):
        compiler.compiler_version()


# The choice of nvcc


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "0")
    monkeypatch.setattr(compiler, "_find_nvcc", lambda: None)


def fake_nvcc(directory: Path, version: str) -> Path:
    path = directory / "nvcc"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release x, V{version}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.usefixtures("no_nvcc")
def test_without_nvcc_nvrtc_is_used_with_one_warning() -> None:
    source = make_source("fill", {"VALUE": 7})
    with pytest.warns(RuntimeWarning, match="DG_JIT_USE_NVRTC=0 asks for nvcc, but there is none"):
        compile_cubin(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.compiler_version().startswith("NVRTC")
        compile_cubin(source)


@pytest.mark.parametrize(("version", "is_used"), [("12.1.105", False), ("12.10.3", True)])
def test_old_nvcc_is_not_used(
    version: str, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "0")
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", str(fake_nvcc(tmp_path, version)))
    if is_used:
        assert compiler.compiler_version() == f"nvcc {version}"
    else:
        with pytest.warns(RuntimeWarning, match=f"is version {version}, and 12.3 is needed"):
            assert compiler.compiler_version().startswith("NVRTC")


def test_nvcc_is_found_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "0")
    fake_nvcc(tmp_path, "12.8.93")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert compiler.compiler_version() == "nvcc 12.8.93"


def test_wrong_path_of_nvcc_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "0")
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", "/no/such/nvcc")
    with pytest.raises(ValueError, match="DG_JIT_NVCC_COMPILER is '/no/such/nvcc'"):
        compiler.compiler_version()


@needs_nvcc
def test_failing_nvcc_is_reported_with_command_and_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "0")
    with pytest.raises(CompileError, match=r"exit status \d+ of .*nvcc .*-cubin"):
        compile_cubin(make_source("wrong", {}))
