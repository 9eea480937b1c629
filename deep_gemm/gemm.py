"""Dense FP8 GEMM: the straight line from a call to a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deep_gemm import checks, driver, jit, layout, plan, reference
from deep_gemm.arguments import Operands, Template, make_template, remember
from deep_gemm.config import settings
from deep_gemm.launch import Launch
from deep_gemm.types import KernelConfig, Problem

Pair = Sequence[torch.Tensor]
Recipe = Sequence[int] | None

# Launches by all that goes into them: a call that repeats, addresses included, only looks its own
# up. One that differs from an earlier one in nothing but addresses copies that one's template.
_launches: dict[tuple[Any, ...], Launch] = {}
_templates: dict[tuple[Any, ...], Template] = {}


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
        template = _prepare(problem, Operands(a[0], a[1], b[0], b[1], d), None)
        if key:
            remember(_templates, key[1], template)
    else:
        checks.check_addresses(a[0], a[1], b[0], b[1], d)
    sfa = layout.native_sfa(a[1], a[0].shape[0], a[0].shape[1])
    launch = template.at(Operands(a[0], sfa, b[0], b[1], d))
    launch()
    if key and sfa is a[1]:  # a transposed copy has another address the next time
        remember(_launches, key, launch)


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
        template = _prepare(problem, Operands(a[0], a[1], b[0], b[1], d), config)
        template.at(Operands(a[0], sfa, b[0], b[1], d))()


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
            d.shape, d.stride(), d.dtype, d.device, b_data.device, options, settings.launch_state,
        )  # fmt: skip
    except (AttributeError, TypeError, ValueError, RuntimeError):  # for the checks to explain
        return None
    return addresses, rest


def _transposed(pair: Pair) -> Pair:
    """Transposed views of a pair; anything else is left for the checks to refuse."""
    if not isinstance(pair, (tuple, list)):
        return pair
    return [
        each.transpose(0, 1) if isinstance(each, torch.Tensor) and each.dim() == 2 else each
        for each in pair
    ]


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


def _prepare(problem: Problem, operands: Operands, config: KernelConfig | None) -> Template:
    """Plan, compile or find the kernel, and pack its arguments."""
    device_index = operands.d.device.index
    available, _ = driver.device_properties(device_index)
    num_sms = min(settings.num_sms or available, available)
    gemm_plan = plan.make_plan(problem, num_sms, settings.pdl, config)
    if settings.print_configs:
        print(f"{problem}\n  -> {gemm_plan}")
    kernel = jit.load_kernel("fp8_gemm_1d2d", gemm_plan.kernel.constants())
    return make_template(kernel, problem, gemm_plan, operands, device_index)
