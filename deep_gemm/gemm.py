"""Dense FP8 GEMM: the straight line from a call to a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from deep_gemm import checks, driver, jit, layout, plan, reference
from deep_gemm.config import settings
from deep_gemm.launch import Launch
from deep_gemm.tensor_map import TENSOR_MAP_BYTES, make_tensor_map
from deep_gemm.types import BLOCK_K, GemmPlan, KernelConfig, Problem

Pair = Sequence[torch.Tensor]
Recipe = Sequence[int] | None

# Launches by everything that went into them: a call that repeats only looks its launch up.
_launches: dict[tuple[Any, ...] | None, Launch] = {}
_MAX_LAUNCHES = 16384


def fp8_gemm_nt(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """D = A @ B.T in FP8, with one scale per 1 x 128 of A and per 128 x 128 of B.

    Every 128 channels are summed in the tensor core, then scaled and accumulated in float32
    (two-level accumulation: DeepSeek-V3 Technical Report, section 3.3.2). Runs on the current
    stream; on CPU tensors, and after ``set_backend("reference")``, with PyTorch ops.

    Args:
        a: pair of A, float8_e4m3fn [m, k], and its scales, float32 [m, ceil(k / 128)]. Scales that
            are MN-major with 16-byte aligned columns (`per_token_cast_to_fp8` returns them so) are
            used as they are; others cost one transposing launch.
        b: pair of B, float8_e4m3fn [n, k], and its scales, float32 [ceil(n / 128), ceil(k / 128)],
            contiguous or the transpose of a contiguous tensor.
        d: bfloat16 [m, n], overwritten. m = 0 or n = 0: nothing happens; k = 0: zeros.
        c: must be None: this recipe does not accumulate.
        recipe: None or (1, 128, 128).
        recipe_a, recipe_b: (1, 128) and (128, 128), together, instead of `recipe`.
        compiled_dims: accepted for compatibility, letters out of "mnk". No size is compiled into a
            kernel here, so it has no effect.
        disable_ue8m0_cast: accepted for compatibility; scales stay float32 on Hopper.

    Rows may be further apart than their width: row strides of A and B are multiples of 16 elements,
    that of D of 8, addresses of 16 bytes; n % 8 = 0, k % 16 = 0.

    Raises:
        ValueError, TypeError: an argument does not fit; the text says which, why and what to do.
        NotImplementedError: a recipe, dtype or GPU that is not supported.
    """
    key = _key(a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims)
    launch = _launches.get(key)
    if launch is not None:
        launch()
        return
    checks.check_compiled_dims(compiled_dims)
    problem = checks.check_dense(a, b, d, c, recipe, recipe_a, recipe_b)
    if _finished_without_launch(problem, a, b, d):
        return
    sfa = layout.native_sfa(a[1], problem.m, problem.k)
    launch = _prepare(problem, (a[0], sfa), b, d, None)
    launch()
    if sfa is a[1]:  # a transposed copy has another address the next time
        _remember(key, launch)


def fp8_gemm_nn(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """D = A @ B: `fp8_gemm_nt` with B as [k, n] and its scales as [ceil(k / 128), ceil(n / 128)].

    FP8 operands of Hopper's tensor cores are K-major, so B has to be the transposed view of
    contiguous [n, k] data (and so may its scales be).
    """
    options = c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast
    fp8_gemm_nt(a, _transposed(b), d, *options)


def fp8_gemm_tn(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: str = "mn",
    disable_ue8m0_cast: bool = False,
) -> None:
    """D = A.T @ B: `fp8_gemm_nt` with A as [k, m] and B as [k, n], both transposed views."""
    options = c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast
    fp8_gemm_nt(_transposed(a), _transposed(b), d, *options)


def fp8_gemm_tt(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: str = "mn",
    disable_ue8m0_cast: bool = False,
) -> None:
    """D = A.T @ B.T: `fp8_gemm_nt` with A as [k, m], a transposed view."""
    options = c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast
    fp8_gemm_nt(_transposed(a), b, d, *options)


def run_dense(a: Pair, b: Pair, d: torch.Tensor, config: KernelConfig) -> None:
    """`fp8_gemm_nt` with an explicit kernel config, for experiments; CUDA tensors only.

    Raises:
        ValueError: also when `config` does not fit into shared memory.
    """
    problem = checks.check_dense(a, b, d, None, None, None, None)
    if not _finished_without_launch(problem, a, b, d):
        sfa = layout.native_sfa(a[1], problem.m, problem.k)
        _prepare(problem, (a[0], sfa), b, d, config)()


def _key(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    c: torch.Tensor | None,
    recipe: Recipe,
    recipe_a: Recipe,
    recipe_b: Recipe,
    compiled_dims: str,
) -> tuple[Any, ...] | None:
    """Everything that a launch depends on; None if the arguments are not even of the right kind."""
    try:
        (a_data, sfa), (b_data, sfb) = a, b
        return (
            a_data.data_ptr(), a_data.shape, a_data.stride(), a_data.dtype,
            sfa.data_ptr(), sfa.shape, sfa.stride(), sfa.dtype,
            b_data.data_ptr(), b_data.shape, b_data.stride(), b_data.dtype,
            sfb.data_ptr(), sfb.shape, sfb.stride(), sfb.dtype,
            d.data_ptr(), d.shape, d.stride(), d.dtype, d.device, settings.epoch,
            c is None, recipe and tuple(recipe), recipe_a and tuple(recipe_a),
            recipe_b and tuple(recipe_b), compiled_dims,
        )  # fmt: skip
    except (AttributeError, TypeError, ValueError):  # the checks will say what is wrong
        return None


def _remember(key: tuple[Any, ...] | None, launch: Launch) -> None:
    if key is None:
        return
    if len(_launches) >= _MAX_LAUNCHES:
        _launches.clear()
    _launches[key] = launch


def _transposed(pair: Pair) -> Pair:
    """Transposed views of a pair; anything else is left for the checks to refuse."""
    if not isinstance(pair, (tuple, list)):
        return pair
    return [
        each.transpose(0, 1) if isinstance(each, torch.Tensor) and each.dim() == 2 else each
        for each in pair
    ]


class _Args(ctypes.Structure):
    """`struct fp8_gemm_1d2d_args` of the kernel; the tail is what its alignment of 128 adds."""

    _fields_ = (
        ("_tensor_maps", ctypes.c_uint8 * (7 * TENSOR_MAP_BYTES)),
        ("sfb", ctypes.c_uint64),
        ("sfb_stride_n", ctypes.c_uint32),
        ("sfb_stride_k", ctypes.c_uint32),
        ("shape_m", ctypes.c_uint32),
        ("shape_n", ctypes.c_uint32),
        ("shape_k", ctypes.c_uint32),
        ("raster_m", ctypes.c_uint32),
        ("_tail", ctypes.c_uint8 * 96),
    )

    def __init__(self, tensor_maps: bytes, **scalars: int) -> None:
        super().__init__(**scalars)
        ctypes.memmove(ctypes.addressof(self), tensor_maps, len(tensor_maps))


def _finished_without_launch(problem: Problem, a: Pair, b: Pair, d: torch.Tensor) -> bool:
    """Deal with empty problems and the reference backend."""
    if problem.m == 0 or problem.n == 0:
        return True
    if problem.k == 0:
        d.zero_()
        return True
    if d.device.type == "cpu" or settings.backend == "reference":
        reference.gemm_nt(a[0], a[1], b[0], b[1], d)
        return True
    return False


def _prepare(
    problem: Problem, a: Pair, b: Pair, d: torch.Tensor, config: KernelConfig | None
) -> Launch:
    """Plan, compile or find the kernel, and pack its arguments; scales of A are native here."""
    device_index = d.device.index
    available, _ = driver.device_properties(device_index)
    num_sms = min(settings.num_sms or available, available)
    gemm_plan = plan.make_plan(problem, num_sms, settings.pdl, config)
    if settings.print_configs:
        print(f"{problem}\n  -> {gemm_plan}")
    kernel = jit.load_kernel("fp8_gemm_1d2d", gemm_plan.kernel.constants())
    args = _make_args(problem, gemm_plan, a[0], a[1], b[0], b[1], d)
    return Launch(kernel, gemm_plan.launch, args, device_index)


def _make_args(
    problem: Problem,
    gemm_plan: GemmPlan,
    a: torch.Tensor,
    sfa: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    d: torch.Tensor,
) -> _Args:
    config, m, n, k = gemm_plan.kernel, problem.m, problem.n, problem.k
    k_blocks = -(-k // BLOCK_K)
    sfa_stride = sfa.stride(1) if k_blocks > 1 else -(-m // 4) * 4
    a_rows, b_rows = config.block_m // config.cluster_n, config.block_n // config.cluster_m
    maps = [
        # one map for whole tiles, one for those at the edge (the kernel tells why)
        *(
            make_tensor_map(a.data_ptr(), "uint8", (m, k), problem.a_stride, (rows, BLOCK_K), 128)
            for rows in (a_rows, m % a_rows or a_rows)
        ),
        *(
            make_tensor_map(b.data_ptr(), "uint8", (n, k), problem.b_stride, (rows, BLOCK_K), 128)
            for rows in (b_rows, n % b_rows or b_rows)
        ),
        *(
            make_tensor_map(sfa.data_ptr(), "float32", (k_blocks, m), sfa_stride, (1, rows), 0)
            for rows in (config.block_m, -(-(m % config.block_m) // 4) * 4 or config.block_m)
        ),
        make_tensor_map(
            d.data_ptr(), "bfloat16", (m, n), problem.d_stride, (16, config.slab_n),
            config.slab_n * 2,
        ),
    ]  # fmt: skip
    return _Args(
        tensor_maps=b"".join(maps),
        sfb=sfb.data_ptr(),
        sfb_stride_n=problem.sfb_strides[0],
        sfb_stride_k=problem.sfb_strides[1],
        shape_m=m,
        shape_n=n,
        shape_k=k,
        raster_m=gemm_plan.raster_m,
    )
