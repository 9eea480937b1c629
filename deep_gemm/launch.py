"""Launching a kernel on torch's current stream."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from deep_gemm import driver
from deep_gemm.types import LaunchConfig


class Launch:
    """A launch with everything fixed but the stream; immutable, so threads may share it.

    Args:
        kernel: what `jit.load_kernel` returned.
        config: grid, threads, shared memory, cluster and PDL.
        args: the kernel's one argument; its bytes are read at every launch.
        device_index: CUDA device that the arguments point into.
    """

    __slots__ = ("_args", "_config", "_configs", "_context", "_device", "_handle", "_params")

    def __init__(
        self, kernel: Any, config: LaunchConfig, args: ctypes.Structure, device_index: int
    ) -> None:
        if config.smem_bytes > 48 * 1024:
            kernel.set_max_smem(config.smem_bytes, device_index)
        self._handle = kernel.handle
        self._config = config
        self._device = device_index
        self._context = int(driver.primary_context(device_index))
        self._configs: dict[int, Any] = {}  # by stream
        self._set_args(args)

    def with_args(self, args: ctypes.Structure) -> Launch:
        """The same launch with another argument."""
        other = Launch.__new__(Launch)
        other._handle, other._config, other._device = self._handle, self._config, self._device
        other._context, other._configs = self._context, self._configs
        other._set_args(args)
        return other

    def _set_args(self, args: ctypes.Structure) -> None:
        self._args = args  # keeps alive what the next line points at
        self._params = (ctypes.c_void_p * 1)(ctypes.addressof(args))

    def __call__(self) -> None:
        """Enqueue the kernel; raises `driver.DriverError` if the driver refuses."""
        api = driver.api()
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        config = self._configs.get(stream)
        if config is None:
            config = self._configs[stream] = _launch_config(self._config, stream)
        params = ctypes.addressof(self._params)
        if int(driver.check(api.cuCtxGetCurrent(), "cuCtxGetCurrent")) == self._context:
            status = api.cuLaunchKernelEx(config, self._handle, params, 0)
        else:  # a new thread, or another device is current
            with driver.context(self._device):
                status = api.cuLaunchKernelEx(config, self._handle, params, 0)
        driver.check(status, "cuLaunchKernelEx")


def run(kernel: Any, config: LaunchConfig, args: ctypes.Structure, device_index: int) -> None:
    """Launch once; see `Launch`."""
    Launch(kernel, config, args, device_index)()


def _launch_config(config: LaunchConfig, stream: int) -> Any:
    api = driver.api()
    launch = api.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = config.grid, 1, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = config.threads, 1, 1
    launch.sharedMemBytes = config.smem_bytes
    launch.hStream = stream
    ids = api.CUlaunchAttributeID
    attributes = []
    if config.cluster > 1:
        cluster = api.CUlaunchAttribute()
        cluster.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x = config.cluster
        cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
        attributes.append(cluster)
    if config.pdl:
        dependent = api.CUlaunchAttribute()
        dependent.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        dependent.value.programmaticStreamSerializationAllowed = 1
        attributes.append(dependent)
    launch.attrs = attributes
    launch.numAttrs = len(attributes)
    return launch
