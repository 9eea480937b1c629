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
_launches: dict[tuple[Any, ...], Launch] = {}
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
    a_data, sfa = a
    b_data, sfb = b
    key = (
        a_data.data_ptr(), a_data.shape, a_data.stride(), a_data.dtype,
        sfa.data_ptr(), sfa.shape, sfa.stride(), sfa.dtype,
        b_data.data_ptr(), b_data.shape, b_data.stride(), b_data.dtype,
        sfb.data_ptr(), sfb.shape, sfb.stride(), sfb.dtype,
        d.data_ptr(), d.shape, d.stride(), d.dtype, d.device,
        c, recipe and tuple(recipe), recipe_a and tuple(recipe_a), recipe_b and tuple(recipe_b),
        compiled_dims, settings.epoch,
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is not None:
        launch()
        return
    checks.check_compiled_dims(compiled_dims)
    problem = checks.check_dense(a, b, d, c, recipe, recipe_a, recipe_b)
