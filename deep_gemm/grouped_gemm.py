"""Grouped FP8 GEMM for Mixture of Experts: rows of A belong to groups with weights of their own.

Three layouts tell which row belongs to which group; all numbers about rows stay on the device:

- contiguous, ids: groups lie one after another in A and D, `grouped_layout` has a group per row.
- contiguous, prefix sums ("psum"): the same, `grouped_layout` has the end row of each group.
- masked: every group has the same room, [groups, m_max, ...], and uses the first `masked_m` rows.

Each call is one launch on the current stream, without a synchronisation, and can be captured in a
CUDA graph and replayed with other numbers. Results are those of `fp8_gemm_nt` on the rows of each
group, to the last bit. On CPU tensors, and after ``set_backend("reference")``, PyTorch ops run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deep_gemm import checks, driver, grouped_checks, jit, layout, plan, reference
from deep_gemm.arguments import Operands, Template, make_template, remember
from deep_gemm.config import settings
from deep_gemm.gemm import Pair, Recipe
from deep_gemm.launch import Launch
from deep_gemm.types import KernelConfig, Problem

# As in `gemm`: launches by all that goes into them, templates by the same without addresses.
_launches: dict[tuple[Any, ...], Launch] = {}
_templates: dict[tuple[Any, ...], Template] = {}


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    grouped_layout: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    *,
    m_indices: torch.Tensor | None = None,
) -> None:
    """D[rows of g] = A[rows of g] @ B[g].T for every group g, with the scales of `fp8_gemm_nt`.

    Args:
        a: pair of A, float8_e4m3fn [m, k], and its scales, float32 [m, ceil(k / 128)]; MN-major
            with 16-byte aligned columns they are used as they are, else copied by one more launch.
        b: pair of weights, float8_e4m3fn [groups, n, k], packed, and their scales, float32 [groups,
            ceil(n / 128), ceil(k / 128)], contiguous or transposed in the last two dimensions.
        d: bfloat16 [m, n].
        grouped_layout: int32 on the device. Ids: [m], the group of each row, -1 in padding. A
            block, as many rows as `get_mk_alignment_for_contiguous_layout` says (a multiple of 16),
            belongs to one group, that of its first row with an id. Prefix sums: [groups], the end
            row of each group; a group begins at the end of the one before, rounded up to that
            alignment (any from 1 up), so groups without rows are allowed.
        recipe, recipe_a, recipe_b: None, or (1, 128, 128), or (1, 128) and (128, 128).
        use_psum_layout: `grouped_layout` holds prefix sums.
        ensure_zero_padding: padding rows of a block that has other rows become zeros; otherwise
            they are left alone. Blocks without a row of a group are never written.
        expected_m_for_psum_layout: about how many rows a group has; chooses a kernel, no result
            depends on it. None: m / groups.
        m_indices: the older name of `grouped_layout`.
        compiled_dims, disable_ue8m0_cast: accepted for compatibility, without effect.

    Padding may hold anything, NaN included. Row strides of A and B are multiples of 16 elements,
    that of D of 8; n % 8 = 0, k % 16 = 0. m = 0: nothing happens. k = 0: rows become zeros.
    Ids and ends out of range are not followed; ``DG_DEBUG_CHECKS=1`` reports them.

    Raises:
        ValueError, TypeError: an argument does not fit; the text says which, why and what to do.
        NotImplementedError: a recipe, dtype or GPU that is not supported.
    """
    grouped_layout = _one_name(grouped_layout, m_indices)
    expected_m = _rounded_hint(expected_m_for_psum_layout)

    def check() -> Problem:
        checks.check_compiled_dims(compiled_dims)
        return grouped_checks.check_contiguous(
            a, b, d, grouped_layout, recipe, recipe_a, recipe_b, use_psum_layout, expected_m
        )

    recipes = recipe, recipe_a, recipe_b
    options = "contiguous", use_psum_layout, settings.mk_alignment, expected_m, compiled_dims
    _call(check, a, b, d, grouped_layout, ensure_zero_padding, options, recipes)


def m_grouped_fp8_gemm_nn_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    grouped_layout: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    *,
    m_indices: torch.Tensor | None = None,
) -> None:
    """`m_grouped_fp8_gemm_nt_contiguous` with B as [groups, k, n], a transposed view of packed
    [groups, n, k] data, and its scales as [groups, ceil(k / 128), ceil(n / 128)]."""
    m_grouped_fp8_gemm_nt_contiguous(
        a, _transposed(b), d, grouped_layout, recipe, recipe_a, recipe_b, compiled_dims,
        disable_ue8m0_cast, use_psum_layout, ensure_zero_padding, m_indices=m_indices,
    )  # fmt: skip


def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """D[g, :masked_m[g]] = A[g, :masked_m[g]] @ B[g].T for every group g: decoding.

    Args:
        a: pair of A, float8_e4m3fn [groups, m_max, k], packed, and its scales, float32 [groups,
            m_max, ceil(k / 128)]; `get_mn_major_tma_aligned_tensor` has the layout that is used as
            it is, others cost one more launch.
        b: pair of weights as in `m_grouped_fp8_gemm_nt_contiguous`.
        d: bfloat16 [groups, m_max, n], packed. Rows past `masked_m` are never written.
        masked_m: int32 [groups] on the device, 0 to m_max. Groups of 0 cost nothing.
        expected_m: about how many rows a group uses; chooses a kernel, no result depends on it.

    Other arguments, sizes and errors are those of `m_grouped_fp8_gemm_nt_contiguous`.
    """
    if isinstance(expected_m, int):
        expected_m = _rounded_hint(expected_m)

    def check() -> Problem:
        checks.check_compiled_dims(compiled_dims)
        return grouped_checks.check_masked(
            a, b, d, masked_m, expected_m, recipe, recipe_a, recipe_b
        )

    options = "masked", expected_m, compiled_dims
    _call(check, a, b, d, masked_m, False, options, (recipe, recipe_a, recipe_b))


def run_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    config: KernelConfig,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m: int | None = None,
) -> None:
    """`m_grouped_fp8_gemm_nt_contiguous` with an explicit kernel config, for experiments."""
    problem = grouped_checks.check_contiguous(
        a, b, d, grouped_layout, use_psum_layout=use_psum_layout, expected_m=expected_m
    )
    _run(problem, a, b, d, grouped_layout, ensure_zero_padding, config)


def run_masked(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    config: KernelConfig,
    expected_m: int = 0,
) -> None:
    """`m_grouped_fp8_gemm_nt_masked` with an explicit kernel config, for experiments."""
    problem = grouped_checks.check_masked(a, b, d, masked_m, expected_m)
    _run(problem, a, b, d, masked_m, False, config)


def _call(
    check: Callable[[], Problem],
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    zero_padding: bool,
    options: tuple[Any, ...],
    recipes: tuple[Recipe, ...],
) -> None:
    """Look the launch up, or make it: the same steps as in `gemm.fp8_gemm_nt`."""
    options = *options, zero_padding
    key = None if settings.debug_checks else _key(a, b, d, grouped_layout, options, recipes)
    launch = _launches.get(key) if key else None
    if launch is not None:
        launch()
        return
    template = _templates.get(key[1]) if key else None
    if template is None:
        problem = check()
        if _finished_without_launch(problem, a, b, d, grouped_layout, zero_padding):
            return
        template = _prepare(problem, a, b, d, grouped_layout, zero_padding, None)
        if key:
            remember(_templates, key[1], template)
    else:
        checks.check_addresses(a[0], a[1], b[0], b[1], d)
    sfa = layout.native_sfa(a[1], a[0].shape[-2], a[0].shape[-1])
    launch = template.at(Operands(a[0], sfa, b[0], b[1], d, grouped_layout))
    launch()
    if key and sfa is a[1]:  # a transposed copy has another address the next time
        remember(_launches, key, launch)


def _run(
    problem: Problem, a: Pair, b: Pair, d: torch.Tensor, grouped_layout: torch.Tensor,
    zero_padding: bool, config: KernelConfig,
) -> None:  # fmt: skip
    if not _finished_without_launch(problem, a, b, d, grouped_layout, zero_padding):
        template = _prepare(problem, a, b, d, grouped_layout, zero_padding, config)
        sfa = layout.native_sfa(a[1], problem.m, problem.k)
        template.at(Operands(a[0], sfa, b[0], b[1], d, grouped_layout))()


def _key(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    options: tuple[Any, ...],
    recipes: tuple[Recipe, ...],
) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """(addresses, all else that a launch depends on); None if there is no telling from these."""
    try:
        (a_data, sfa), (b_data, sfb) = a, b
        options = *options, *(each and tuple(each) for each in recipes)
        hash(options)  # a nested list, say
        addresses = (
            a_data.data_ptr(), sfa.data_ptr(), b_data.data_ptr(), sfb.data_ptr(), d.data_ptr(),
            grouped_layout.data_ptr(),
        )  # fmt: skip
        rest = (
            a_data.shape, a_data.stride(), a_data.dtype,
            sfa.shape, sfa.stride(), sfa.dtype, addresses[1] % 16,  # not aligned: not native
            b_data.shape, b_data.stride(), b_data.dtype,
            sfb.shape, sfb.stride(), sfb.dtype,
            d.shape, d.stride(), d.dtype, d.device, b_data.device,
            grouped_layout.shape, grouped_layout.stride(), grouped_layout.dtype,
            grouped_layout.device, options, settings.launch_state,
        )  # fmt: skip
    except (AttributeError, TypeError, ValueError, RuntimeError):  # for the checks to explain
        return None
    return addresses, rest


def _finished_without_launch(
    problem: Problem, a: Pair, b: Pair, d: torch.Tensor, grouped_layout: torch.Tensor,
    zero_padding: bool,
) -> bool:  # fmt: skip
    """Deal with empty problems and the reference backend."""
    if problem.m == 0 or problem.n == 0:
        return True
    if problem.k > 0 and d.device.type != "cpu" and settings.backend != "reference":
        return False
    alignment = settings.mk_alignment
    reference.gemm_grouped(
        problem.kind, a[0], a[1], b[0], b[1], d, grouped_layout, alignment, zero_padding
    )
    return True


def _prepare(
    problem: Problem, a: Pair, b: Pair, d: torch.Tensor, grouped_layout: torch.Tensor,
    zero_padding: bool, config: KernelConfig | None,
) -> Template:  # fmt: skip
    """Plan, compile or find the kernel, and pack its arguments."""
    device_index = d.device.index
    available, _ = driver.device_properties(device_index)
    num_sms = min(settings.num_sms or available, available)
    gemm_plan = plan.make_plan(problem, num_sms, settings.pdl, config)
    if settings.print_configs:
        print(f"{problem}\n  -> {gemm_plan}")
    kernel = jit.load_kernel("fp8_gemm_1d2d", gemm_plan.kernel.constants())
    operands = Operands(a[0], a[1], b[0], b[1], d, grouped_layout)
    return make_template(
        kernel, problem, gemm_plan, operands, device_index, settings.mk_alignment, zero_padding
    )


def _one_name(grouped_layout: Any, m_indices: Any) -> Any:
    if (grouped_layout is None) == (m_indices is None):
        got = "neither is given" if m_indices is None else "both are given"
        raise TypeError(
            f"grouped_layout and its older name m_indices: {got}, expected one of them; pass "
            f"grouped_layout"
        )
    return m_indices if grouped_layout is None else grouped_layout


def _rounded_hint(expected_m: Any) -> Any:
    """A hint in steps, so that calls with about the same one share a launch."""
    if not isinstance(expected_m, int) or isinstance(expected_m, bool):
        return expected_m
    step = 8 if expected_m <= 64 else 64
    return -(-max(expected_m, 0) // step) * step


def _transposed(pair: Pair) -> Pair:
    """B's transposed views; anything else is left for the checks to refuse."""
    if not isinstance(pair, (tuple, list)):
        return pair
    return [
        each.mT if isinstance(each, torch.Tensor) and each.dim() == 3 else each for each in pair
    ]


fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked  # the name of July 2025
# Upstream's names of the same functions: FP8 pairs run, packed FP4 raises NotImplementedError.
m_grouped_fp8_fp4_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_fp8_fp4_gemm_nn_contiguous = m_grouped_fp8_gemm_nn_contiguous
m_grouped_fp8_fp4_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked
