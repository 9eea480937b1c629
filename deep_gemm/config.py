"""Every setting of the library: the environment variables, and what programs set by function.

A variable is read when its setting is used, never at import, so that `os.environ` may be changed at
any time; calls that repeat are remembered, though, and keep the backend of the first until
`set_backend` chooses another. An empty variable counts as unset, and a variable that is
not listed here is ignored.
"""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from deep_gemm.types import Backend

T = TypeVar("T")


@functools.cache
def warn_once(text: str) -> None:
    """Warn (`RuntimeWarning`) the first time that this process says `text`."""
    warnings.warn(text, RuntimeWarning, stacklevel=3)


class _Env(Generic[T]):
    """A read-only attribute whose value is that of the first of `names` set in the environment."""

    def __init__(self, names: tuple[str, ...], values: dict[str, T] | None, default: T) -> None:
        self.names = names  # today's name, then the older ones
        self.values = values  # spelling -> value; None: any text is the value
        self.default = default

    def __get__(self, instance: object, owner: type) -> T:
        for name in self.names:
            text = os.environ.get(name)
            if not text:
                continue
            if self.values is None:
                return text  # type: ignore[return-value]  # T is str here
            if text.lower() not in self.values:
                raise ValueError(f"{name} is {text!r}, expected one of {', '.join(self.values)}")
            return self.values[text.lower()]
        return self.default


def _flag(*names: str, default: bool = False) -> _Env[bool]:
    return _Env(names, {"0": False, "1": True, "false": False, "true": True}, default)


def _choice(default: T, values: tuple[T, ...], *names: str) -> _Env[T]:
    return _Env(names, {str(value): value for value in values}, default)


def _text(*names: str) -> _Env[str]:
    return _Env(names, None, "")


class Settings:
    """The one instance is `settings`; functions such as `deep_gemm.set_backend` write to it."""

    launch_state: tuple[Any, ...]  # what a remembered launch depends on of what programs have set

    print_configs = _flag("DG_PRINT_CONFIGS")  # print each new plan
    use_nvidia_tools = _flag("DG_USE_NVIDIA_TOOLS", "DG_NSYS_PROFILING")  # a profiler is attached
    debug_checks = _flag("DG_DEBUG_CHECKS")  # check group ids and sizes on the device: synchronises
    jit_debug = _flag("DG_JIT_DEBUG")  # print each cache hit, miss and compile time
    jit_use_nvrtc = _flag("DG_JIT_USE_NVRTC", default=True)  # 0: nvcc where there is one
    jit_nvcc_compiler = _text("DG_JIT_NVCC_COMPILER", "DG_NVCC_COMPILER")  # path or name of nvcc
    jit_cpp_standard = _choice(17, (17, 20), "DG_JIT_CPP_STANDARD", "DG_JIT_OVERRIDE_CPP_STANDARD")
    jit_disable_cache = _flag("DG_JIT_DISABLE_CACHE")  # neither read nor write the disk cache
    jit_print_compiler_command = _flag("DG_JIT_PRINT_COMPILER_COMMAND", "DG_JIT_PRINT_NVCC_COMMAND")
    jit_print_load_time = _flag("DG_JIT_PRINT_LOAD_TIME")  # time to load a cubin into the driver
    jit_ptxas_verbose = _flag("DG_JIT_PTXAS_VERBOSE", "DG_PTXAS_VERBOSE")  # print ptxas -v
    jit_ptxas_check = _flag("DG_JIT_PTXAS_CHECK")  # beside spills, refuse any use of local memory
    jit_with_lineinfo = _flag("DG_JIT_WITH_LINEINFO")  # source lines for profilers
    jit_dump_asm = _flag("DG_JIT_DUMP_ASM")  # both of the next two
    jit_dump_ptx = _flag("DG_JIT_DUMP_PTX")  # write <entry>.ptx into the cache directory
    jit_dump_sass = _flag("DG_JIT_DUMP_SASS")  # write <entry>.sass into the cache directory
    _backend = _choice("auto", get_args(Backend), "DG_BACKEND")
    _cache_dir = _text("DG_JIT_CACHE_DIR", "DG_CACHE_DIR")

    def __init__(self) -> None:
        self._set_backend: Backend | None = None
        self.num_sms = 0  # SMs that a launch may use; 0: all of the device
        self.tc_util = 100  # percent of the tensor cores' time that a caller wants used
        self.pdl = False  # programmatic dependent launch
        self.mk_alignment = 128  # rows of a group's block in the contiguous layouts

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        state = tuple(vars(self).get(each) for each in ("_set_backend", "num_sms", "pdl"))
        super().__setattr__("launch_state", state)

    @property
    def backend(self) -> Backend:
        """What `set_backend` has chosen, else DG_BACKEND, else "auto"."""
        return self._set_backend or self._backend

    @backend.setter
    def backend(self, name: Backend | None) -> None:
        if name is not None and name not in get_args(Backend):
            raise ValueError(
                f"backend is {name!r}, expected one of {', '.join(get_args(Backend))}, or None for "
                "DG_BACKEND's"
            )
        self._set_backend = name

    @property
    def jit_cache_dir(self) -> Path | None:
        """Where compiled kernels should be kept; None where there is not even a home directory.

        $DG_JIT_CACHE_DIR, else $XDG_CACHE_HOME/deep_gemm, else ~/.cache/deep_gemm. Whether it can
        be used is for `deep_gemm.jit.cache` to find out.
        """
        if self._cache_dir:
            return Path(os.path.expanduser(self._cache_dir)).absolute()
        base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        return base / "deep_gemm" if base.is_absolute() else None

    def variables(self) -> dict[str, Any]:
        """Every environment variable by today's name, with the value in force ("": unset)."""
        settings = [value for value in vars(Settings).values() if isinstance(value, _Env)]
        return {setting.names[0]: setting.__get__(self, Settings) for setting in settings}


settings = Settings()
