"""`jit.build` and `jit.load_kernel`: memory, threads, forks, messages, and the driver's part."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jit_tools import run_python

from deep_gemm import driver, jit
from deep_gemm.jit import CompileError, compiler, cubin

pytest_plugins = ["jit_fixtures"]
pytestmark = pytest.mark.usefixtures("kernels")

FILL = ("fill", {"VALUE": 7})


def test_memory_then_disk_then_compiler() -> None:
    first = jit.build(*FILL)
    assert jit.build(*FILL) is first
    jit.forget()
    assert jit.build(*FILL) == first
    assert jit.counters() == {"memory_hits": 1, "disk_hits": 1, "compiled": 1}


def test_other_constants_are_another_kernel() -> None:
    assert jit.build(*FILL) != jit.build("fill", {"VALUE": 8})
    assert jit.counters()["compiled"] == 2


def test_is_compiled() -> None:
    assert not jit.is_compiled(*FILL)
    jit.build(*FILL)
    assert jit.is_compiled(*FILL)
    jit.forget()
    assert jit.is_compiled(*FILL)
    assert jit.counters() == {"memory_hits": 0, "disk_hits": 0, "compiled": 1}


def test_import_is_lazy(tmp_path: Path) -> None:
    output = run_python(
        "import os, sys\n"
        "import deep_gemm.config, deep_gemm.jit\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in "
        "('cuda', 'torch', 'filelock')), os.listdir())",
        HOME=str(tmp_path),
        DG_JIT_CACHE_DIR=str(tmp_path / "untouched"),
        DG_JIT_USE_NVRTC="neither",  # is read at use only
    )
    assert output.startswith("[] ")
    assert not (tmp_path / "untouched").exists()


# Threads and forks


def test_threads_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    compile_cubin = compiler.compile_cubin

    def slow(source: Any) -> bytes:
        calls.append(source.name)
        time.sleep(0.1)
        return compile_cubin(source)

    monkeypatch.setattr(compiler, "compile_cubin", slow)
    start = threading.Barrier(4)

    def work(_: int) -> bytes:
        start.wait()
        return jit.build(*FILL)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    assert calls == ["fill"]
    assert all(code is results[0] for code in results)
    assert jit.counters() == {"memory_hits": 3, "disk_hits": 0, "compiled": 1}


def test_different_kernels_compile_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=30)  # breaks if one waits for the other
    compile_cubin = compiler.compile_cubin

    def meet(source: Any) -> bytes:
        together.wait()
        return compile_cubin(source)

    monkeypatch.setattr(compiler, "compile_cubin", meet)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda value: jit.build("fill", {"VALUE": value}), (1, 2)))


def test_failed_build_can_be_tried_again(kernels: Path) -> None:
    for _ in range(2):
        with pytest.raises(CompileError):
            jit.build("wrong", {})
    header = kernels / "wrong.cuh"
    header.write_text(header.read_text().replace("undeclared", "1"))
    jit.build("wrong", {})
    assert jit.counters()["compiled"] == 3


FORK = """
import os, threading
from pathlib import Path
from deep_gemm import jit
from deep_gemm.jit import codegen, compiler
codegen.KERNELS = Path(os.environ["ROOT"])
jit.build("fill", {"VALUE": 1})
jit._kernels["a handle of the parent"] = object()

held, done = threading.Event(), threading.Event()
def hold():
    with jit._lock(jit._key("fill", {"VALUE": 2})), jit._counters_lock:
        held.set()
        done.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    assert not jit._kernels
    jit.build("fill", {"VALUE": 1})  # still in memory
    jit.build("fill", {"VALUE": 2})  # though a thread of the parent has its lock
    os._exit(0 if jit.counters() == {"memory_hits": 1, "disk_hits": 0, "compiled": 2} else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
done.set()
assert "a handle of the parent" in jit._kernels
print(status)
"""


def test_forked_child_has_its_own_handles_and_locks(kernels: Path) -> None:
    assert run_python(FORK, ROOT=str(kernels)) == "0\n"


# What people see


def test_compile_error_names_the_source(cache_dir: Path) -> None:
    with pytest.raises(CompileError, match="undeclared") as caught:
        jit.build("wrong", {})
    text = str(caught.value)
    path = Path(text.rsplit("The source is ", 1)[1])
    assert path.parent == cache_dir
    assert '#include "wrong.cuh"' in path.read_text()
    assert not list(cache_dir.glob("*.cubin"))


def test_compile_error_names_the_source_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_DISABLE_CACHE", "1")
    with pytest.raises(CompileError) as caught:
        jit.build("wrong", {})
    path = Path(str(caught.value).rsplit("The source is ", 1)[1])
    assert '#include "wrong.cuh"' in path.read_text()
    path.unlink()
    path.parent.rmdir()


def test_debug_prints_hits_and_misses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_dir: Path
) -> None:
    jit.build("fill", {"VALUE": 0})
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("DG_JIT_DEBUG", "1")
    jit.build(*FILL)
    missed = capsys.readouterr()
    assert missed.out == ""
    assert missed.err.startswith("deep_gemm: miss fill-")
    assert f"kept in {cache_dir}" in missed.err
    jit.forget()
    jit.build(*FILL)
    assert capsys.readouterr().err.startswith("deep_gemm: hit fill-")


@pytest.mark.skipif(
    cubin._nvdisasm() is None, reason="no nvdisasm: pip install nvidia-cuda-nvdisasm"
)
def test_dumps(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    jit.build(*FILL)
    jit.forget()
    monkeypatch.setenv("DG_JIT_DUMP_ASM", "1")
    jit.build(*FILL)  # a hit, and dumped all the same
    (ptx,), (sass,) = cache_dir.glob("fill-*.ptx"), cache_dir.glob("fill-*.sass")
    assert ".target sm_90a" in ptx.read_text()
    assert "EXIT" in sass.read_text()


# The driver's part, with a driver that only takes notes


class FakeDriver:
    """Notes calls; every one succeeds but those named in `failing`."""

    CUfunction = staticmethod(lambda address: f"function {address}")
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            status = Status(209 if name in self.failing else 0)
            return (status, len(self.calls))

        return call


class Status(int):
    name = "CUDA_ERROR_NO_BINARY_FOR_GPU"


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "api", lambda: fake)
    return fake


def test_kernel_is_loaded_once(fake_driver: FakeDriver) -> None:
    kernel = jit.load_kernel(*FILL)
    assert jit.load_kernel(*FILL) is kernel
    assert [call[0] for call in fake_driver.calls] == ["cuLibraryLoadData", "cuLibraryGetKernel"]
    assert fake_driver.calls[0][1] == jit.build(*FILL)
    assert fake_driver.calls[1][1:] == (1, b"fill")
    assert kernel.name == "fill"
    assert kernel.handle == "function 2"
    assert kernel.registers > 0


def test_shared_memory_is_set_once_per_device(fake_driver: FakeDriver) -> None:
    kernel = jit.load_kernel(*FILL)
    fake_driver.calls.clear()
    for device in (0, 1, 0, 1):
        kernel.set_max_smem(200_000, device)
    set_calls = [call for call in fake_driver.calls if call[0] == "cuKernelSetAttribute"]
    assert [call[1:4] for call in set_calls] == [(8, 200_000, 2)] * 2


def test_load_time_is_printed(
    fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DG_JIT_PRINT_LOAD_TIME", "1")
    jit.load_kernel(*FILL)
    assert "deep_gemm: fill: loaded in" in capsys.readouterr().err


def test_driver_that_refuses_is_reported_and_asked_again(
    fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_describe", lambda status: "only the real driver knows")
    fake_driver.failing = {"cuLibraryLoadData"}
    with pytest.raises(driver.DriverError, match=r"cuLibraryLoadData of fill, compiled by NVRTC"):
        jit.load_kernel(*FILL)
    fake_driver.failing = set()
    assert jit.load_kernel(*FILL).name == "fill"


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a driver")
def test_without_a_driver_build_works_and_load_says_why() -> None:
    jit.build(*FILL)
    with pytest.raises(driver.DriverError, match=r"libcuda|cuInit"):
        jit.load_kernel(*FILL)
