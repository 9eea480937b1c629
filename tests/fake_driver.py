"""A CUDA driver that notes what it is asked for; its data types are those of cuda-bindings.

With it, `Line` follows a call on CPU tensors to its launch, as one on a Hopper GPU goes.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as bindings

from deep_gemm import arguments, driver, jit, plan, tensor_map
from deep_gemm.arguments import KernelArgs
from deep_gemm.config import settings
from deep_gemm.jit.codegen import KERNELS
from deep_gemm.types import KernelConfig, Problem

SUCCESS = bindings.CUresult.CUDA_SUCCESS
ARGS_BYTES = 1280
NUM_TENSOR_MAPS = 9
# Places of tensor maps in the argument: the first for whole tiles, then those for parts of one.
MAPS_A, MAPS_B, MAPS_SFA, MAP_D = range(4), range(4, 6), range(6, 8), 8


@dataclass
class Encoded:
    """The arguments of one cuTensorMapEncodeTiled, in plain numbers, outermost dimension first."""

    dtype: str
    address: int
    shape: tuple[int, ...]
    stride_bytes: int
    box: tuple[int, ...]
    swizzle: str


@dataclass
class Launched:
    grid: int
    threads: int
    smem_bytes: int
    stream: int
    cluster: int | None
    pdl: bool
    handle: Any
    args: bytes
    contexts: list[int]


@dataclass
class FakeDriver:
    """`driver.api()` of the tests. A fake tensor map begins with its address and its number."""

    encoded: list[Encoded] = field(default_factory=list)
    launched: list[Launched] = field(default_factory=list)
    contexts: list[int] = field(default_factory=lambda: [1])  # the stack; device i has i + 1
    calls: list[str] = field(default_factory=list)
    launch_status: Any = SUCCESS

    def __getattr__(self, name: str) -> Any:
        return getattr(bindings, name)  # types and enumerations

    def cuTensorMapEncodeTiled(
        self, dtype: Any, rank: int, address: int, sizes: Any, strides: Any, box: Any,
        element_strides: Any, interleave: Any, swizzle: Any, promotion: Any, fill: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        assert rank == len(sizes) == len(box) == len(strides) + 1 == 2
        assert [int(stride) for stride in element_strides] == [1, 1]
        self.encoded.append(
            Encoded(
                dtype.name.removeprefix("CU_TENSOR_MAP_DATA_TYPE_"),
                int(address),
                tuple(int(size) for size in sizes[::-1]),
                int(strides[0]),
                tuple(int(size) for size in box[::-1]),
                swizzle.name.removeprefix("CU_TENSOR_MAP_SWIZZLE_"),
            )
        )
        content = (ctypes.c_uint64 * 16)(address, len(self.encoded) - 1)
        return SUCCESS, SimpleNamespace(getPtr=lambda: ctypes.addressof(content), keep=content)

    def cuTensorMapReplaceAddress(self, tensor_map: Any, address: int) -> tuple[Any]:
        self.calls.append("cuTensorMapReplaceAddress")
        ctypes.c_uint64.from_address(int(tensor_map.getPtr())).value = int(address)
        return (SUCCESS,)

    def CUtensorMap(self, address: int) -> Any:
        return SimpleNamespace(getPtr=lambda: address)

    def cuLaunchKernelEx(self, config: Any, handle: Any, params: int, extra: int) -> tuple[Any]:
        if self.launch_status != SUCCESS:
            return (self.launch_status,)
        assert (config.gridDimY, config.gridDimZ) == (config.blockDimY, config.blockDimZ) == (1, 1)
        ids = bindings.CUlaunchAttributeID
        values = {int(attribute.id): attribute.value for attribute in config.attrs}
        assert len(values) == config.numAttrs
        cluster = values.pop(int(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION), None)
        pdl = values.pop(int(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION), None)
        assert not values
        assert cluster is None or (cluster.clusterDim.y, cluster.clusterDim.z) == (1, 1)
        argument = ctypes.c_uint64.from_address(params).value
        self.launched.append(
            Launched(
                config.gridDimX,
                config.blockDimX,
                config.sharedMemBytes,
                int(config.hStream),
                cluster.clusterDim.x if cluster else None,
                bool(pdl and pdl.programmaticStreamSerializationAllowed),
                handle,
                ctypes.string_at(argument, ARGS_BYTES),
                list(self.contexts),
            )
        )
        return (SUCCESS,)

    def cuCtxGetCurrent(self) -> tuple[Any, int]:
        return SUCCESS, self.contexts[-1]

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any]:
        self.contexts.append(int(context))
        return (SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, int]:
        return SUCCESS, self.contexts.pop()

    def maps_of(self, launched: Launched) -> dict[int, Encoded]:
        """The tensor maps in a launch's argument by their place, with the addresses it had."""
        found = {}
        for i in range(NUM_TENSOR_MAPS):
            word = launched.args[128 * i : 128 * i + 16]
            address, number = (int.from_bytes(word[j : j + 8], "little") for j in (0, 8))
            if address:
                found[i] = Encoded(**{**vars(self.encoded[number]), "address": address})
        return found


class FakeKernel:
    """What `jit.load_kernel` returns."""

    def __init__(self, name: str = "", constants: dict[str, int] | None = None) -> None:
        self.name, self.constants, self.handle = name, constants or {}, object()
        self.max_smem: list[tuple[int, int]] = []

    def set_max_smem(self, num_bytes: int, device_index: int) -> None:
        self.max_smem.append((num_bytes, device_index))


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Put a fake in the driver's place, and stream 7 into torch's."""
    fake = FakeDriver()
    tensor_map.make_tensor_map.cache_clear()
    monkeypatch.setattr(driver, "api", lambda: fake)
    monkeypatch.setattr(driver, "_describe", lambda status: "a description")
    monkeypatch.setattr(driver, "primary_context", lambda index: (index or 0) + 1)
    monkeypatch.setattr(driver, "device_properties", lambda index: (132, (9, 0)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    return fake


def stage_bytes(config: KernelConfig, rows_m: int, rows_n: int) -> int:
    """What `load_tiles` announces for each stage of a tile, by the expressions in its source.

    `rows_m`: as there, of all boxes of A that arrive.
    """
    text = " ".join((KERNELS / "producer.cuh").read_text().split())
    (expression,) = re.findall(r"stage_bytes = ([^;]+);", text)
    expression = expression.replace("static_cast<uint32_t>(sizeof(float))", "4")
    scales = re.findall(r"num_scales = Config::IS_GROUPED \? [^?]+::(\w+) : ([^;]+);", text)
    names = {"rows_m": rows_m, "rows_n": rows_n, "BLOCK_K": 128, "SFA_ROWS": config.block_m + 4}

    def value(expression: str) -> int:
        return int(eval(expression.replace("/", "//"), {"__builtins__": {}}, names))

    names["num_scales"] = value(scales[0][not config.is_grouped])
    return value(expression)


class FakeCounters(arguments.UnitCounters):
    """The counters of every device begin at address 4096; no memory is behind them."""

    def _allocate(self, device_index: int) -> int:
        self._counters[device_index] = 4096
        return 4096


class Line:
    """What happened on the way: problems planned, kernels loaded, launches."""

    def __init__(self, fake: FakeDriver) -> None:
        self.fake = fake
        self.planned: list[Problem] = []
        self.loaded: list[tuple[str, dict[str, int]]] = []

    @property
    def launched(self) -> list[Launched]:
        return self.fake.launched

    def args(self, index: int = -1) -> KernelArgs:
        """The argument of a launch."""
        return KernelArgs.from_buffer_copy(self.launched[index].args)

    def addresses(self, index: int = -1) -> tuple[int, ...]:
        """(a, b, sfa, d, sfb) of a launch."""
        maps = self.fake.maps_of(self.launched[index])
        args = self.args(index)
        found = []
        for places in (MAPS_A, MAPS_B, MAPS_SFA):
            (address,) = {maps[i].address for i in places if i in maps}
            found.append(address)
        assert maps[MAP_D].address == args.d
        return *found, args.d, args.sfb


def install_line(monkeypatch: pytest.MonkeyPatch, module: Any) -> Line:
    """Let CPU tensors take the way of those on a GPU through `module`, `gemm` or `grouped_gemm`."""
    line = Line(install(monkeypatch))
    make_plan, finished = plan.make_plan, module._finished_without_launch

    def plan_and_note(problem: Problem, *rest: Any) -> Any:
        line.planned.append(problem)
        return make_plan(problem, *rest)

    def load(name: str, constants: dict[str, int]) -> FakeKernel:
        line.loaded.append((name, constants))
        return FakeKernel(name, constants)

    def finished_as_on_a_gpu(problem: Problem, *rest: Any) -> bool:
        is_empty = 0 in (problem.m, problem.n, problem.k)
        if is_empty or settings.backend == "reference":
            return bool(finished(problem, *rest))
        return False

    monkeypatch.setattr(plan, "make_plan", plan_and_note)
    monkeypatch.setattr(jit, "load_kernel", load)
    monkeypatch.setattr(arguments, "unit_counters", FakeCounters())
    monkeypatch.setattr(module, "_finished_without_launch", finished_as_on_a_gpu)
    monkeypatch.setattr(module, "_launches", {})
    monkeypatch.setattr(module, "_templates", {})
    return line
