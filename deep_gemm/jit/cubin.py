"""What a cubin says about its kernels, read from the ELF file; no GPU and no driver needed."""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# Attributes of the ELF section .nv.info: each holds a symbol number and a value for that symbol.
_FRAME_SIZE, _REGISTER_COUNT = 0x11, 0x2F
_SIZED_FORMAT = 4  # an attribute whose 16-bit field is the size of what follows

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_]*)")


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What each thread of a kernel occupies."""

    registers: int  # as launched, before setmaxnreg
    frame_bytes: int  # stack frame in local memory; spilled registers live there, too


def kernels(cubin: bytes) -> dict[str, KernelResources]:
    """The kernels of `cubin` by name; the figures are those that ``ptxas -v`` prints.

    Raises:
        ValueError: `cubin` is not a 64-bit ELF file with NVIDIA's kernel information.
    """
    try:
        return _read(cubin)
    except (struct.error, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"not a cubin, or a damaged one ({len(cubin)} bytes)") from error


def _read(cubin: bytes) -> dict[str, KernelResources]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF header")

    def text(offset: int) -> str:
        return cubin[offset : cubin.index(b"\0", offset)].decode()

    # Section headers: name, type, flags, address, offset, size, link, info, alignment, entry size.
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, count, names_idx = struct.unpack_from("<HHH", cubin, 58)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_bytes) for i in range(count)
    ]
    sections = {text(headers[names_idx][4] + header[0]): header for header in headers}
    symbols, strings = sections[".symtab"][4], sections[".strtab"][4]

    found: dict[int, dict[int, int]] = {}
    offset, size = sections[".nv.info"][4:6]
    end = offset + size
    while offset < end:
        layout, attribute, value_bytes = struct.unpack_from("<BBH", cubin, offset)
        offset += 4
        if layout == _SIZED_FORMAT:
            if attribute in (_FRAME_SIZE, _REGISTER_COUNT):
                symbol, value = struct.unpack_from("<II", cubin, offset)
                found.setdefault(symbol, {})[attribute] = value
            offset += value_bytes
    return {
        text(strings + struct.unpack_from("<I", cubin, symbols + 24 * symbol)[0]): KernelResources(
            values[_REGISTER_COUNT], values[_FRAME_SIZE]
        )
        for symbol, values in found.items()
        if _REGISTER_COUNT in values
    }


def disassemble(cubin: bytes) -> str:
    """The SASS of `cubin`, by nvdisasm.

    Raises:
        FileNotFoundError: there is no nvdisasm; the text says how to get it.
        subprocess.CalledProcessError: nvdisasm does not accept `cubin`.
    """
    tool = _nvdisasm()
    if tool is None:
        raise FileNotFoundError(
            "nvdisasm is neither on PATH, nor in CUDA_HOME, nor installed as a Python package; "
            "get it with: pip install nvidia-cuda-nvdisasm"
        )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kernel.cubin")
        path.write_bytes(cubin)
        command = [tool, "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def opcode_counts(sass: str) -> Counter[str]:
    """How often each opcode occurs in `sass`, without its modifiers: QGMMA, UTMALDG, LDL, ..."""
    return Counter(_INSTRUCTION.findall(sass))


@functools.cache
def _nvdisasm() -> str | None:
    from cuda.pathfinder import find_nvidia_binary_utility

    found: str | None = find_nvidia_binary_utility("nvdisasm")
    return found or shutil.which("nvdisasm")
