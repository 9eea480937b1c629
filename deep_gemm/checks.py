"""User tensors -> `Problem`: every error about arguments is raised here, before any launch.

Only metadata is read (shape, dtype, strides, device, address), never a value: no synchronisation.
Both backends refuse the same calls, so that what runs on a CPU also runs on a Hopper GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deep_gemm import driver
from deep_gemm.config import settings
from deep_gemm.types import BLOCK_K, Problem

Recipe = Sequence[int] | None

_FP8 = torch.float8_e4m3fn
_RECIPE = (1, 128, 128)
_QUANTISER = {"a": "per_token_cast_to_fp8", "b": "per_block_cast_to_fp8"}
_PACKED_FP4 = (torch.int8, torch.uint8, getattr(torch, "float4_e2m1fn_x2", None))
_MAX_SIZE = 2**31 - 1  # TMA coordinates are signed 32-bit integers


def can_run(
    a: Any,
    b: Any,
    d: Any,
    c: Any = None,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: Any = "nk",
    disable_ue8m0_cast: bool = False,
) -> bool:
    """Tell whether `fp8_gemm_nt` accepts these arguments; takes the same ones, raises nothing.

    Checks shapes, dtypes, strides, addresses and devices as the call itself does, without a
    launch, a compilation or a look at the data.
    """
    try:
        check_compiled_dims(compiled_dims)
        check_dense(a, b, d, c, recipe, recipe_a, recipe_b)
    except (ValueError, TypeError, NotImplementedError):
        return False
    return True


def check_dense(
    a: Any,
    b: Any,
    d: Any,
    c: Any = None,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
) -> Problem:
    """Check one dense GEMM ``d = a @ b.T`` and describe it.

    `a` is (E4M3 [m, k], float32 [m, ceil(k/128)]), `b` is (E4M3 [n, k], float32 [ceil(n/128),
    ceil(k/128)]), each a tuple or a list; `d` is bfloat16 [m, n]. The recipe has to mean
    (1, 128, 128). Strides of dimensions of size one or zero are ignored.

    Raises TypeError (not a pair, not a tensor, wrong dtype), ValueError (shape, stride, address,
    device mix), NotImplementedError (recipe, accumulation, FP4, GPU that the kernels cannot use).
    """
    a_data, sfa = _pair("a", a)
    b_data, sfb = _pair("b", b)
    _check_tensor("d", d)
    _check_recipe(recipe, recipe_a, recipe_b)
    _check_output(c, d)
    _check_operand_dtypes("a", a_data, sfa)
    _check_operand_dtypes("b", b_data, sfb)
    m, n, k = _check_shapes(a_data, sfa, b_data, sfb, d)
    a_stride = _check_k_major("a", a_data)
    b_stride = _check_k_major("b", b_data)
    d_stride = _check_row_stride("d", d, 8, "d = torch.empty(m, n, dtype=torch.bfloat16) has it")
    sfb_strides = _check_sfb_layout(sfb)
    check_addresses(a_data, sfa, b_data, sfb, d)
    check_gpu(d.device)
    return Problem("dense", m, n, k, str(d.device), a_stride, b_stride, d_stride, sfb_strides)


def check_compiled_dims(compiled_dims: Any) -> None:
    """Check upstream's performance knob: some of the letters m, n, k; it changes no result here."""
    if not isinstance(compiled_dims, str):
        raise TypeError(
            f"compiled_dims is a {type(compiled_dims).__name__}, expected a str out of the letters "
            f"m, n, k; leave it out"
        )
    if not set(compiled_dims.lower()) <= set("mnk"):
        raise ValueError(
            f"compiled_dims is {compiled_dims!r}, expected only the letters m, n, k; leave it out"
        )


def check_addresses(
    a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor, d: torch.Tensor
) -> None:
    """Check what may differ between calls of equal shapes, strides and dtypes: where tensors are.

    They have to be on one device; `a`, `b` and `d` start at multiples of 16 bytes.

    Overlap of `d` with an input is looked for where both are dense; views with gaps are trusted.
    """
    device = a.device
    for name, tensor in (("sfa", sfa), ("b", b), ("sfb", sfb), ("d", d)):
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}, expected {device} where a is; "
                + ("allocate it there" if name == "d" else f"{name}.to({str(device)!r}) moves it")
            )
    for name, tensor in (("a", a), ("b", b), ("d", d)):
        if tensor.data_ptr() % 16 and tensor.numel():
            remedy = "a new tensor" if name == "d" else f"{name}.clone()"
            raise ValueError(
                f"{name} starts at address {tensor.data_ptr():#x}, expected a multiple of 16 bytes "
                f"(TMA); {remedy} has it, as has a view that starts at a multiple of "
                f"{16 // tensor.element_size()} elements"
            )
    begin, end = d.data_ptr(), d.data_ptr() + d.nbytes
    if not begin or not d.is_contiguous():  # address 0: no memory, as of meta tensors
        return
    for name, tensor in (("a", a), ("sfa", sfa), ("b", b), ("sfb", sfb)):
        start = tensor.data_ptr()
        if (
            start < end
            and begin < start + tensor.nbytes
            and (tensor.is_contiguous() or tensor.mT.is_contiguous())
        ):
            raise ValueError(
                f"d shares memory with {name}, expected separate storage: tiles of d are written "
                f"while {name} is still being read; pass a new tensor as d"
            )


def check_gpu(device: torch.device) -> None:
    """Refuse a device that the kernels cannot use, unless the reference backend was asked for."""
    if device.type == "cpu" or settings.backend == "reference":
        return
    if device.type != "cuda":
        raise NotImplementedError(
            f"the tensors are on {device}, expected CUDA (Hopper) or CPU tensors; "
            f'deep_gemm.set_backend("reference") runs PyTorch operations on any device'
        )
    _, capability = driver.device_properties(device.index)
    if capability != (9, 0):
        raise NotImplementedError(
            f"{device} is {torch.cuda.get_device_name(device.index)}, compute capability "
            f"{capability[0]}.{capability[1]}, expected Hopper (9.0): the kernels use its wgmma "
            f'instructions; deep_gemm.set_backend("reference") runs PyTorch operations instead'
        )


def _pair(name: str, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        got = type(value).__name__
        if isinstance(value, (tuple, list)):
            got += f" of {len(value)} items"
        raise TypeError(
            f"{name} is a {got}, expected a pair (data, scales), tuple or list; "
            f"{_QUANTISER[name]} makes it"
        )
    data, scales = value
    _check_tensor(name, data)
    _check_tensor(f"sf{name}", scales)
    return data, scales


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, expected a torch.Tensor")
    if value.layout != torch.strided:
        raise TypeError(
            f"{name} has layout {value.layout}, expected torch.strided; {name}.to_dense() has it"
        )


def _check_recipe(recipe: Recipe, recipe_a: Recipe, recipe_b: Recipe) -> None:
    for name, value, length in (
        ("recipe", recipe, 3),
        ("recipe_a", recipe_a, 2),
        ("recipe_b", recipe_b, 2),
    ):
        if value is not None and not _is_recipe(value, length):
            meaning = "(gran_m, gran_n, gran_k)" if length == 3 else "(gran_mn, gran_k)"
            raise ValueError(f"{name} is {value!r}, expected None or {length} sizes {meaning}")
    if (recipe_a is None) != (recipe_b is None):
        present, absent = ("recipe_a", "recipe_b") if recipe_b is None else ("recipe_b", "recipe_a")
        raise ValueError(f"{present} is given without {absent}, expected both or neither")
    if recipe_a is not None and recipe_b is not None:
        if recipe is not None:
            raise ValueError(
                f"recipe={tuple(recipe)} is given together with recipe_a and recipe_b, expected "
                f"one of the two forms; leave recipe out"
            )
        if (tuple(recipe_a), tuple(recipe_b)) != ((1, 128), (128, 128)):
            raise NotImplementedError(
                f"recipe_a={tuple(recipe_a)}, recipe_b={tuple(recipe_b)} is not supported, "
                f"expected (1, 128) and (128, 128): one scale per row of a, per 128x128 block of b"
            )
    if recipe is not None and tuple(recipe) != _RECIPE:
        raise NotImplementedError(
            f"recipe={tuple(recipe)} is not supported, expected None or {_RECIPE}: one scale per "
            f"row and 128 channels of a, per 128x128 block of b; this version has no weight "
            f"gradients (1, 1, 128) yet"
        )


def _is_recipe(value: Any, length: int) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == length
        and all(isinstance(size, int) and size > 0 for size in value)
    )


def _check_output(c: Any, d: torch.Tensor) -> None:
    if c is not None:
        raise NotImplementedError(
            f"c is given, expected None: this version overwrites d (recipe {_RECIPE}, bfloat16), "
            f"it does not accumulate; add c to d afterwards"
        )
    if d.dtype == torch.float32:
        raise NotImplementedError(
            "d has dtype torch.float32, expected torch.bfloat16: this version writes bfloat16 "
            "only (float32 comes with the weight gradients); allocate it so, and convert afterwards"
        )
    if d.dtype != torch.bfloat16:
        raise TypeError(f"d has dtype {d.dtype}, expected torch.bfloat16; allocate d with it")


def _check_operand_dtypes(name: str, data: torch.Tensor, scales: torch.Tensor) -> None:
    maker = _QUANTISER[name]
    if data.dtype != _FP8:
        if data.dtype in _PACKED_FP4:
            raise NotImplementedError(
                f"{name} has dtype {data.dtype} (packed FP4), expected {_FP8}: FP4 needs an SM100 "
                f"GPU, this library is for Hopper; {maker} makes FP8"
            )
        raise TypeError(f"{name} has dtype {data.dtype}, expected {_FP8}; {maker} makes it")
    if scales.dtype != torch.float32:
        remedy = f"{maker} makes them"
        if scales.dtype == torch.int32:
            remedy = "packed UE8M0 scales are for SM100, unpack_ue8m0_from_int makes float32"
        elif scales.dtype.is_floating_point:
            remedy = f"sf{name}.float() has the same values"
        raise TypeError(f"sf{name} has dtype {scales.dtype}, expected torch.float32; {remedy}")


def _check_shapes(
    a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor, d: torch.Tensor
) -> tuple[int, int, int]:
    for name, tensor in (("a", a), ("sfa", sfa), ("b", b), ("sfb", sfb), ("d", d)):
        if tensor.dim() != 2:
            raise ValueError(
                f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}, expected 2; "
                f"flatten leading dimensions with reshape(-1, size)"
            )
    m, k = a.shape
    n = b.shape[0]
    if b.shape[1] != k:
        raise ValueError(
            f"b has shape {tuple(b.shape)}, expected ({n}, {k}) = (n, k) for a of shape "
            f"{tuple(a.shape)}; nn, tn and tt take operands that are stored the other way round"
        )
    if tuple(d.shape) != (m, n):
        raise ValueError(
            f"d has shape {tuple(d.shape)}, expected {(m, n)} = (m, n) for a of shape "
            f"{tuple(a.shape)} and b of shape {tuple(b.shape)}; allocate d with it"
        )
    if max(m, n, k) > _MAX_SIZE:
        raise ValueError(f"(m, n, k) is {(m, n, k)}, expected each below 2**31; split the call")
    for name, size, multiple in (("n", n, 8), ("k", k, 16)):
        if size % multiple:
            padded = -(-size // multiple) * multiple
            raise ValueError(
                f"{name} is {size}, expected a multiple of {multiple} (TMA moves whole 16-byte "
                f"pieces); pad with zeros to {padded}"
            )
    num_k_blocks = -(-k // BLOCK_K)
    num_n_blocks = -(-n // BLOCK_K)
    _check_scale_shape("a", sfa, (m, num_k_blocks), f"(m, ceil(k / 128)) for m = {m}, k = {k}")
    _check_scale_shape(
        "b",
        sfb,
        (num_n_blocks, num_k_blocks),
        f"(ceil(n / 128), ceil(k / 128)) for n = {n}, k = {k}",
    )
    return m, n, k


def _check_scale_shape(
    name: str, scales: torch.Tensor, expected: tuple[int, ...], meaning: str
) -> None:
    got = tuple(scales.shape)
    if got != expected:
        # never swapped silently: a square scale matrix could not be told apart
        remedy = f"{_QUANTISER[name]} makes it"
        if len(got) == len(expected) and got == (*expected[:-2], expected[-1], expected[-2]):
            remedy = f"pass sf{name}.{'t()' if len(got) == 2 else 'mT'}"
        raise ValueError(f"sf{name} has shape {got}, expected {expected} = {meaning}; {remedy}")


def _check_k_major(name: str, data: torch.Tensor) -> int:
    rows, k = data.shape
    if rows and k and data.stride(1) != 1:
        size = "m" if name == "a" else "n"
        raise ValueError(
            f"{name} is not K-major: as [{size}, k] = {tuple(data.shape)} it has strides "
            f"{data.stride()}, expected stride 1 along k, since Hopper's tensor cores read FP8 "
            f"K-major only (nn, tn and tt take transposed views of K-major data); in the "
            f"[{size}, k] form {name}.contiguous() is K-major"
        )
    return _check_row_stride(name, data, 16, f"{name}.contiguous() has it")


def _check_row_stride(name: str, tensor: torch.Tensor, multiple: int, remedy: str) -> int:
    """The row stride in elements, canonical (the width) where no second row exists."""
    rows, width = tensor.shape
    if not rows or not width:
        return width
    if width > 1 and tensor.stride(1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}, expected stride 1 in the last dimension; "
            f"{remedy}"
        )
    if rows == 1:
        return width
    stride = tensor.stride(0)
    if stride < width or stride % multiple:
        raise ValueError(
            f"{name} has row stride {stride} for shape {tuple(tensor.shape)}, expected a multiple "
            f"of {multiple} elements (16 bytes, TMA) that is not below the width; {remedy}"
        )
    return stride


def _check_sfb_layout(sfb: torch.Tensor) -> tuple[int, int]:
    """Canonical strides of the weight scales along n-blocks and k-blocks."""
    num_n_blocks, num_k_blocks = sfb.shape[-2:]
    if sfb.is_contiguous():
        return num_k_blocks, 1
    if sfb.mT.is_contiguous():
        return 1, num_n_blocks
    raise ValueError(
        f"sfb has strides {sfb.stride()} for shape {tuple(sfb.shape)}, expected a contiguous "
        f"tensor or the transposed view of one; sfb.contiguous() has it"
    )
