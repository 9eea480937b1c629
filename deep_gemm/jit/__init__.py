"""Kernels, compiled when they are first used: memory, then disk, then the compiler.

Importing this module loads no compiler and no driver, and touches no disk. All of it may be used
by several threads, and after a fork.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from deep_gemm import driver
from deep_gemm.config import settings
from deep_gemm.jit import cache, compiler, cubin
from deep_gemm.jit.codegen import KernelSource, make_source
from deep_gemm.jit.compiler import CompileError, MissingCompilerError

__all__ = [
    "CompileError",
    "Kernel",
    "MissingCompilerError",
    "build",
    "counters",
    "forget",
    "is_compiled",
    "load_kernel",
]

_Key = tuple[str, tuple[tuple[str, int], ...]]

_cubins: dict[_Key, bytes] = {}
_kernels: dict[_Key, Kernel] = {}
_locks: dict[_Key, threading.RLock] = {}  # each kernel compiles once, different ones in parallel
_counters: Counter[str] = Counter()
_counters_lock = threading.Lock()


class Kernel:
    """A kernel in the driver, for every device and context of this process."""

    __slots__ = ("_kernel", "_max_smem", "handle", "name", "registers")

    def __init__(self, name: str, code: bytes) -> None:
        api = driver.api()
        what = f"{name}, compiled by {compiler.compiler_version()}"
        library = driver.check(
            api.cuLibraryLoadData(code, [], [], 0, [], [], 0), f"cuLibraryLoadData of {what}"
        )
        self._kernel = driver.check(
            api.cuLibraryGetKernel(library, name.encode()), f"cuLibraryGetKernel of {what}"
        )
        self._max_smem: dict[int, int] = {}
        self.name = name
        self.handle = api.CUfunction(int(self._kernel))  # a CUkernel stands for a CUfunction
        self.registers = cubin.kernels(code)[name].registers  # per thread, at launch

    def set_max_smem(self, num_bytes: int, device_index: int) -> None:
        """Allow launches with `num_bytes` of dynamic shared memory on that device.

        Raises:
            driver.DriverError: the device has less.
        """
        if self._max_smem.get(device_index) == num_bytes:
            return
        api = driver.api()
        attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = driver.check(api.cuDeviceGet(device_index), "cuDeviceGet")
        driver.check(
            api.cuKernelSetAttribute(attribute, num_bytes, self._kernel, device),
            f"cuKernelSetAttribute of {self.name} to {num_bytes} bytes of shared memory",
        )
        self._max_smem[device_index] = num_bytes


def load_kernel(kernel: str, constants: Mapping[str, int]) -> Kernel:
    """The kernel `kernel` with `constants`, compiled if need be and loaded into the driver.

    Raises:
        driver.DriverError: there is no driver, or it does not take the cubin.
        Beside what `build` raises.
    """
    key = _key(kernel, constants)
    found = _kernels.get(key)
    if found is not None:
        return found
    with _lock(key):
        found = _kernels.get(key)
        if found is None:
            code = build(kernel, constants)
            begin = time.perf_counter()
            found = _kernels[key] = Kernel(kernel, code)
            if settings.jit_print_load_time:
                _print(f"{kernel}: loaded in {(time.perf_counter() - begin) * 1e3:.1f} ms")
        return found


def build(kernel: str, constants: Mapping[str, int]) -> bytes:
    """The cubin of `kernel` with `constants`; needs no GPU and no driver.

    Args:
        kernel: the stem of a header in deep_gemm/kernels, such as "fp8_gemm_1d2d".
        constants: the members of its ``struct Config``.

    Raises:
        CompileError: it does not compile; the text says where the source is.
        MissingCompilerError: there is no compiler; the text says what to install.
    """
    key = _key(kernel, constants)
    with _lock(key):
        code = _cubins.get(key)
        if code is not None:
            _count("memory_hits")
            return code
        source = make_source(kernel, constants)
        entry = _entry(source)
        code = _load_or_compile(source, entry)
        _dump(source, entry, code)
        _cubins[key] = code
        return code


def is_compiled(kernel: str, constants: Mapping[str, int]) -> bool:
    """Whether `build` would return without compiling."""
    if _key(kernel, constants) in _cubins:
        return True
    source = make_source(kernel, constants)
    return cache.load(_entry(source)) is not None


def counters() -> dict[str, int]:
    """How often this process found a cubin in memory or on disk, and how often it compiled."""
    with _counters_lock:
        return {name: _counters[name] for name in ("memory_hits", "disk_hits", "compiled")}


def forget() -> None:
    """Drop what is kept in memory, as after a change of the compiler; the disk cache stays."""
    _cubins.clear()
    _kernels.clear()


def _key(kernel: str, constants: Mapping[str, int]) -> _Key:
    return kernel, tuple(constants.items())


def _lock(key: _Key) -> threading.RLock:
    return _locks.setdefault(key, threading.RLock())


def _entry(source: KernelSource) -> str:
    key = cache.key(source, compiler.options(), compiler.compiler_version())
    return f"{source.name}-{key}"


def _load_or_compile(source: KernelSource, entry: str) -> bytes:
    begin = time.perf_counter()
    code = cache.load(entry)
    if code is None:
        with cache.lock(entry):
            code = cache.load(entry)  # another process may have been faster
            if code is None:
                return _compile(source, entry)
    _count("disk_hits")
    if settings.jit_debug:
        _print(f"hit {entry} on disk in {(time.perf_counter() - begin) * 1e3:.1f} ms")
    return code


def _compile(source: KernelSource, entry: str) -> bytes:
    begin = time.perf_counter()
    _count("compiled")
    try:
        code = compiler.compile_cubin(source)
    except CompileError as error:
        path = _keep(f"{entry}.cu", source.text.encode())
        error.args = (f"{error}\nThe source is {path}",)
        raise
    seconds = time.perf_counter() - begin
    cache.store(entry, source.text, code)
    if settings.jit_debug:
        directory = cache.places().write or "memory only"
        _print(f"miss {entry}: compiled in {seconds:.3f} s, kept in {directory}")
    return code


def _dump(source: KernelSource, entry: str, code: bytes) -> None:
    if settings.jit_dump_ptx or settings.jit_dump_asm:
        _print(f"PTX is {_keep(f'{entry}.ptx', compiler.compile_ptx(source).encode())}")
    if settings.jit_dump_sass or settings.jit_dump_asm:
        _print(f"SASS is {_keep(f'{entry}.sass', cubin.disassemble(code).encode())}")


def _keep(name: str, data: bytes) -> Path:
    """Write a file for people to read: beside the cache entries if possible; returns its path."""
    path = cache.write(name, data)
    if path is None:
        path = Path(tempfile.mkdtemp(prefix="deep_gemm-"), name)
        path.write_bytes(data)
    return path


def _count(event: str) -> None:
    with _counters_lock:
        _counters[event] += 1


def _print(text: str) -> None:
    print(f"deep_gemm: {text}", file=sys.stderr)


def _after_fork() -> None:
    """In the child: handles of the driver are void, and a lock's owner may not exist here."""
    global _counters_lock
    _kernels.clear()
    _locks.clear()
    _counters_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
