"""Dense FP8 GEMM: the straight line from a call to a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from deep_gemm import checks, driver, jit, layout, plan, reference
from deep_gemm.config import settings
from deep_gemm.launch import Launch
from deep_gemm.tensor_map import TENSOR_MAP_BYTES, make_tensor_map, replace_address
from deep_gemm.types import BLOCK_K, GemmPlan, KernelConfig, Problem

Pair = Sequence[torch.Tensor]
Recipe = Sequence[int] | None

# Launches by all that goes into them: a call that repeats, addresses included, only looks its own
# up. One that differs from an earlier one in nothing but addresses copies that one's template.
_launches: dict[tuple[Any, ...], Launch] = {}
_templates: dict[tuple[Any, ...], _Template] = {}
_MAX_ENTRIES = 4096


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
    launch = _launches.get(key) if key else None
    if launch is not None:
        launch()
        return
    template = _templates.get(key[1]) if key else None
    if template is None:
        checks.check_compiled_dims(compiled_dims)
        problem = checks.check_dense(a, b, d, c, recipe, recipe_a, recipe_b)
        if _finished_without_launch(problem, a, b, d):
            return
        template = _prepare(problem, a, b, d, None)
        if key:
            _remember(_templates, key[1], template)
    else:
        checks.check_addresses(a[0], a[1], b[0], b[1], d)
    sfa = layout.native_sfa(a[1], a[0].shape[0], a[0].shape[1])
    launch = template.at(a[0], sfa, b[0], b[1], d)
    launch()
    if key and sfa is a[1]:  # a transposed copy has another address the next time
        _remember(_launches, key, launch)


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
    problem = checks.check_dense(a, b, d)
    if not _finished_without_launch(problem, a, b, d):
        sfa = layout.native_sfa(a[1], problem.m, problem.k)
        _prepare(problem, a, b, d, config).at(a[0], sfa, b[0], b[1], d)()


def _key(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    c: torch.Tensor | None,
    recipe: Recipe,
    recipe_a: Recipe,
    recipe_b: Recipe,
    compiled_dims: str,
) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """(addresses, all else that a launch depends on); None if there is no telling from these."""
    try:
        (a_data, sfa), (b_data, sfb) = a, b
        recipes = (each and tuple(each) for each in (recipe, recipe_a, recipe_b))
        options = (c is None, compiled_dims, *recipes)
        hash(options)  # a nested list, say
        addresses = (
            a_data.data_ptr(), sfa.data_ptr(), b_data.data_ptr(), sfb.data_ptr(), d.data_ptr(),
        )  # fmt: skip
        rest = (
            a_data.shape, a_data.stride(), a_data.dtype,
            sfa.shape, sfa.stride(), sfa.dtype, addresses[1] % 16,  # not aligned: not native
            b_data.shape, b_data.stride(), b_data.dtype,
            sfb.shape, sfb.stride(), sfb.dtype,
            d.shape, d.stride(), d.dtype, d.device, b_data.device, options, settings.epoch,
        )  # fmt: skip
    except (AttributeError, TypeError, ValueError, RuntimeError):  # for the checks to explain
        return None
    return addresses, rest


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= _MAX_ENTRIES:
        cache.clear()
    cache[key] = value


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


class _Template:
    """A launch for given sizes and strides, to be copied for the addresses of each call."""

    __slots__ = ("_addresses", "_args", "_launch")

    def __init__(self, launch: Launch, args: _Args, addresses: tuple[int, ...]) -> None:
        self._launch, self._args = launch, args
        self._addresses = addresses  # what each tensor map of `args` points at

    def at(
        self,
        a: torch.Tensor,
        sfa: torch.Tensor,
        b: torch.Tensor,
        sfb: torch.Tensor,
        d: torch.Tensor,
    ) -> Launch:
        args = _Args.from_buffer_copy(self._args)
        args.sfb = sfb.data_ptr()
        pa, pb, psfa = a.data_ptr(), b.data_ptr(), sfa.data_ptr()
        tensor_map = ctypes.addressof(args)
        for old, new in zip(
            self._addresses, (pa, pa, pb, pb, psfa, psfa, d.data_ptr()), strict=True
        ):
            if new != old:
                replace_address(tensor_map, new)
            tensor_map += TENSOR_MAP_BYTES
        return self._launch.with_args(args)


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
) -> _Template:
    """Plan, compile or find the kernel, and pack its arguments."""
    device_index = d.device.index
    available, _ = driver.device_properties(device_index)
    num_sms = min(settings.num_sms or available, available)
    gemm_plan = plan.make_plan(problem, num_sms, settings.pdl, config)
    if settings.print_configs:
        print(f"{problem}\n  -> {gemm_plan}")
    kernel = jit.load_kernel("fp8_gemm_1d2d", gemm_plan.kernel.constants())
    args, addresses = _make_args(problem, gemm_plan, a, b, d)
    return _Template(Launch(kernel, gemm_plan.launch, args, device_index), args, addresses)


def _make_args(
    problem: Problem, gemm_plan: GemmPlan, a: Pair, b: Pair, d: torch.Tensor
) -> tuple[_Args, tuple[int, ...]]:
    """The kernel's argument, and what its tensor maps point at.

    Scales of A that are not native are described as their native copy will be.
    """
    config, m, n, k = gemm_plan.kernel, problem.m, problem.n, problem.k
    (a_data, sfa), (b_data, sfb) = a, b
    k_blocks = -(-k // BLOCK_K)
    native = layout.is_native_sfa(sfa, m, k)
    sfa_stride = sfa.stride(1) if native and k_blocks > 1 else layout.get_tma_aligned_size(m, 4)
    pa, pb, pd = a_data.data_ptr(), b_data.data_ptr(), d.data_ptr()
    psfa = sfa.data_ptr() // 16 * 16
    # One map for whole tiles and one for those at the edge: the kernel tells why.
    a_rows, b_rows = config.block_m // config.cluster_n, config.block_n // config.cluster_m
    a_edge, b_edge = m % a_rows or a_rows, n % b_rows or b_rows
    sfa_edge = -(-(m % config.block_m) // 4) * 4 or config.block_m
    maps = (
        make_tensor_map(pa, "uint8", (m, k), problem.a_stride, (a_rows, BLOCK_K), 128),
        make_tensor_map(pa, "uint8", (m, k), problem.a_stride, (a_edge, BLOCK_K), 128),
        make_tensor_map(pb, "uint8", (n, k), problem.b_stride, (b_rows, BLOCK_K), 128),
        make_tensor_map(pb, "uint8", (n, k), problem.b_stride, (b_edge, BLOCK_K), 128),
        make_tensor_map(psfa, "float32", (k_blocks, m), sfa_stride, (1, config.block_m), 0),
        make_tensor_map(psfa, "float32", (k_blocks, m), sfa_stride, (1, sfa_edge), 0),
        make_tensor_map(
            pd, "bfloat16", (m, n), problem.d_stride, (16, config.slab_n), config.slab_n * 2
        ),
    )
    args = _Args(
        tensor_maps=b"".join(maps),
        sfb=sfb.data_ptr(),
        sfb_stride_n=problem.sfb_strides[0],
        sfb_stride_k=problem.sfb_strides[1],
        shape_m=m,
        shape_n=n,
        shape_k=k,
        raster_m=gemm_plan.raster_m,
    )
    return args, (pa, pa, pb, pb, psfa, psfa, pd)
