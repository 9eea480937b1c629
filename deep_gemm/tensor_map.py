"""Tensor maps: TMA's 128-byte description of a matrix in global memory."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from deep_gemm import driver

TENSOR_MAP_BYTES = 128
_ELEMENT_BYTES = {"uint8": 1, "bfloat16": 2, "float32": 4}


@functools.lru_cache(maxsize=4096)
def make_tensor_map(
    address: int,
    dtype: str,
    shape: tuple[int, int],
    row_stride: int,
    box: tuple[int, int],
    swizzle_bytes: int,
) -> bytes:
    """Encode a row-major matrix for TMA; a pure function of its arguments.

    Args:
        address: device address of the first element, a multiple of 16.
        dtype: "uint8" (any FP8), "bfloat16" or "float32".
        shape: (rows, columns); boxes read zeros and write nothing beyond it.
        row_stride: distance of two rows in elements; in bytes a multiple of 16.
        box: (rows, columns) of one load or store, each at most 256.
        swizzle_bytes: 0, 32, 64 or 128; a box row may not be longer.

    Returns:
        The 128 bytes of a ``CUtensorMap``.

    Raises:
        driver.DriverError: the driver refused the description.
    """
    api = driver.api()
    (rows, columns), (box_rows, box_columns) = shape, box
    swizzle = f"{swizzle_bytes}B" if swizzle_bytes else "NONE"
    dtypes: Any = api.CUtensorMapDataType
    swizzles: Any = api.CUtensorMapSwizzle
    encoded = driver.check(
        api.cuTensorMapEncodeTiled(
            getattr(dtypes, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}"),
            2,
            address,
            [api.cuuint64_t(columns), api.cuuint64_t(rows)],
            [api.cuuint64_t(row_stride * _ELEMENT_BYTES[dtype])],
            [api.cuuint32_t(box_columns), api.cuuint32_t(box_rows)],
            [api.cuuint32_t(1), api.cuuint32_t(1)],
            api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(swizzles, "CU_TENSOR_MAP_SWIZZLE_" + swizzle),
            # Not 256: L2 then fetches what follows a line as well, too early (measured: 5 % slower
            # where weights are streamed).
            api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"cuTensorMapEncodeTiled({dtype} {shape}, row stride {row_stride}, box {box})",
    )
    return ctypes.string_at(encoded.getPtr(), TENSOR_MAP_BYTES)


def replace_address(tensor_map: int, address: int) -> None:
    """Let the tensor map that lies at host address `tensor_map` describe the same matrix elsewhere.

    Costs the host a fraction of `make_tensor_map`. Raises `driver.DriverError` if the driver
    refuses `address` (a device address, a multiple of 16).
    """
    api = driver.api()
    status = api.cuTensorMapReplaceAddress(api.CUtensorMap(tensor_map), address)
    driver.check(status, "cuTensorMapReplaceAddress")
