"""The source of one kernel: its constants, and a wrapper around the header that has the code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).parent.parent / "kernels"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)

_TEMPLATE = """\
// {kernel} with the constants below: what the Python side decided, compiled for sm_90a.
#include "{kernel}.cuh"

struct Config {{
{constants}}};

extern "C" __global__ void __launch_bounds__({kernel}_threads<Config>(), 1)
{kernel}(const __grid_constant__ {kernel}_args args) {{
    {kernel}_body<Config>(args);
}}
"""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Everything that a compiler reads to make one kernel; no path is part of it."""

    name: str  # of the kernel, and of its function in the cubin
    text: str
    headers: tuple[tuple[str, str], ...]  # (name as in #include "...", text), in order of inclusion


def make_source(
    kernel: str, constants: Mapping[str, int], root: Path | None = None
) -> KernelSource:
    """The source of `kernel`, which is the stem of a header in deep_gemm/kernels.

    Args:
        kernel: the header defines ``<kernel>_args``, ``<kernel>_threads`` and ``<kernel>_body``.
        constants: members of ``struct Config``: 32-bit integers and booleans, by name.
        root: the directory of the headers, if it is another one.

    Raises:
        TypeError, ValueError: a constant that has no literal of that kind, or a wrong name.
        FileNotFoundError: there is no such kernel, or it includes a header that is not shipped.
    """
    members = "".join(_member(name, value) for name, value in constants.items())
    headers: dict[str, str] = {}
    _collect(f"{kernel}.cuh", root or KERNELS, headers)
    text = _TEMPLATE.format(kernel=kernel, constants=members)
    return KernelSource(kernel, text, tuple(headers.items()))


def _member(name: str, value: int) -> str:
    if not name.isidentifier():
        raise ValueError(f"constant {name!r} is not a C++ name")
    if not isinstance(value, int):
        raise TypeError(f"constant {name} is {value!r}, expected an int or a bool")
    if not -(2**31) < value < 2**31:
        raise ValueError(f"constant {name} is {value}, expected a 32-bit integer")
    kind, literal = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", value)
    return f"    static constexpr {kind} {name} = {literal};\n"


def _collect(name: str, root: Path, headers: dict[str, str]) -> None:
    if name in headers:
        return
    headers[name] = (root / name).read_text(encoding="utf-8")
    for included in _INCLUDE.findall(headers[name]):
        _collect(included, root, headers)
