"""The public surface: names, signatures, settings, and what importing does not do."""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import pytest
import torch

import deep_gemm
from deep_gemm import driver

FP8 = torch.float8_e4m3fn

GEMM = (
    "a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims={!r}, "
    "disable_ue8m0_cast=False"
)
GROUPED = "recipe=None, recipe_a=None, recipe_b=None, compiled_dims='nk', disable_ue8m0_cast=False"
NN_CONTIGUOUS = (
    f"a, b, d, grouped_layout=None, {GROUPED}, use_psum_layout=False, ensure_zero_padding=True"
)
NT_CONTIGUOUS = f"{NN_CONTIGUOUS}, expected_m_for_psum_layout=None, *, m_indices=None"
NN_CONTIGUOUS += ", *, m_indices=None"
MASKED = f"a, b, d, masked_m, expected_m, {GROUPED}"
BF16_GEMM = "a, b, d, c=None, compiled_dims={!r}"
BF16_CONTIGUOUS = (
    "a, b, d, grouped_layout=None, compiled_dims='nk', use_psum_layout=False, "
    "ensure_zero_padding=True{}, *, m_indices=None"
)
BF16_MASKED = "a, b, d, masked_m, expected_m, compiled_dims='nk'"

# Frozen: a change here is a change that clients see, and a line of CHANGELOG.md.
SIGNATURES = {
    "fp8_gemm_nt": GEMM.format("nk"),
    "fp8_gemm_nn": GEMM.format("nk"),
    "fp8_gemm_tn": GEMM.format("mn"),
    "fp8_gemm_tt": GEMM.format("mn"),
    "fp8_fp4_gemm_nt": GEMM.format("nk"),
    "fp8_fp4_gemm_nn": GEMM.format("nk"),
    "fp8_fp4_gemm_tn": GEMM.format("mn"),
    "fp8_fp4_gemm_tt": GEMM.format("mn"),
    "gemm_fp8_fp8_bf16_nt": "lhs, rhs, out",
    "m_grouped_fp8_gemm_nt_contiguous": NT_CONTIGUOUS,
    "m_grouped_fp8_gemm_nn_contiguous": NN_CONTIGUOUS,
    "m_grouped_fp8_gemm_nt_masked": MASKED,
    "m_grouped_fp8_fp4_gemm_nt_contiguous": NT_CONTIGUOUS,
    "m_grouped_fp8_fp4_gemm_nn_contiguous": NN_CONTIGUOUS,
    "m_grouped_fp8_fp4_gemm_nt_masked": MASKED,
    "fp8_m_grouped_gemm_nt_masked": MASKED,
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous": (
        "lhs, rhs, out, m_indices=None, *, grouped_layout=None"
    ),
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked": "lhs, rhs, out, masked_m, expected_m",
    "build_grouped_layout": (
        "topk_ids, num_experts, layout='psum', *, alignment=None, num_rows=None, m_max=None"
    ),
    "bf16_gemm_nt": BF16_GEMM.format("nk"),
    "bf16_gemm_nn": BF16_GEMM.format("nk"),
    "bf16_gemm_tn": BF16_GEMM.format("mn"),
    "bf16_gemm_tt": BF16_GEMM.format("mn"),
    **{f"cublaslt_gemm_{letters}": "a, b, d, c=None" for letters in ("nt", "nn", "tn", "tt")},
    "m_grouped_bf16_gemm_nt_contiguous": BF16_CONTIGUOUS.format(
        ", expected_m_for_psum_layout=None"
    ),
    "m_grouped_bf16_gemm_nn_contiguous": BF16_CONTIGUOUS.format(""),
    "m_grouped_bf16_gemm_nt_masked": BF16_MASKED,
    "bf16_m_grouped_gemm_nt_masked": BF16_MASKED,
    "k_grouped_bf16_gemm_tn_contiguous": (
        "a, b, d, ks_cpu, grouped_layout, c=None, compiled_dims='mn', use_psum_layout=False"
    ),
    "can_run": "a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, "
    "compiled_dims='nk', disable_ue8m0_cast=False",
    "make_plan": "problem, num_sms, pdl=False, config=None",
    "set_num_sms": "num_sms",
    "get_num_sms": "",
    "set_tc_util": "tc_util",
    "get_tc_util": "",
    "set_pdl": "enable",
    "get_pdl": "",
    "set_ignore_compile_dims": "ignore",
    "set_block_size_multiple_of": "multiple_of",
    "set_backend": "name",
    "get_backend": "",
    "init": "lib_root='', cuda_home=''",
    "ceil_div": "x, y",
    "align": "x, y",
    "ceil_to_ue8m0": "x",
    "pack_ue8m0_to_int": "x",
    "unpack_ue8m0_from_int": "packed_sf",
    "per_token_cast_to_fp8": (
        "x, use_ue8m0=False, gran_k=128, use_packed_ue8m0=False, *, amax_floor=0.0001"
    ),
    "per_channel_cast_to_fp8": "x, use_ue8m0=False, gran_k=128, *, amax_floor=0.0001",
    "per_block_cast_to_fp8": "x, use_ue8m0=False, gran_k=128, *, amax_floor=0.0001",
    "per_custom_dims_cast_to_fp8": "x, dims, use_ue8m0=False, *, amax_floor=0.0001",
    "get_tma_aligned_size": "x, elem_size",
    "get_mn_major_tma_aligned_tensor": "sf",
    "get_col_major_tma_aligned_tensor": "x",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": "sf, psum_layout=None",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": (
        "sf, grouped_layout, ks_cpu, gran_k, k_alignment, use_psum_layout=False"
    ),
    "transform_sf_into_required_layout": (
        "sf, mn, k, recipe, num_groups=None, is_sfa=None, disable_ue8m0_cast=False, "
        "psum_layout=None"
    ),
    "get_mk_alignment_for_contiguous_layout": "",
    "set_mk_alignment_for_contiguous_layout": "alignment",
    "get_m_alignment_for_contiguous_layout": "",
    "get_k_alignment_for_contiguous_layout": "",
    "get_theoretical_mk_alignment_for_contiguous_layout": "expected_m=None",
    "init_dist": "local_rank, num_local_ranks",
    "uneven_all_gather": "tensor, dim=0, group=None",
    "dist_print": "s='', once_in_node=False",
    "bench": "fn, num_warmups=5, num_tests=10, high_precision=False",
    "bench_kineto": (
        "fn, kernel_names, num_tests=30, suppress_kineto_output=False, trace_path=None, "
        "flush_l2=True, with_multiple_kernels=False, barrier=None, *, barrier_comm_profiling=False"
    ),
    "calc_diff": "x, y",
}
CLASSES = {"GroupedLayout", "KernelConfig", "SymmBuffer"}
MODULES = {"jit", "jit_kernels", "legacy", "testing", "utils"}
UNAVAILABLE = {
    "SymmBuffer",
    "bf16_mega_moe",
    "cast_back_from_fp4",
    "fp8_fp4_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "per_token_cast_to_fp4",
    "transform_weights_for_mega_moe",
    "transpose_packed_fp4",
}
TRANSFORMERS_LOADER = [
    "fp8_fp4_gemm_nt",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nn_contiguous",
    "utils.per_token_cast_to_fp8",
    "transform_sf_into_required_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "transform_weights_for_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "fp8_fp4_mega_moe",
    "SymmBuffer",
]
NOT_IMPLEMENTED = [
    "k_grouped_fp8_gemm_nt_contiguous",
    "wgrad_gemm_fp8_fp8_fp32_nt",
    "fp8_mqa_logits",
    "einsum",
    "tf32_hc_prenorm_gemm",
    "no_such_thing",
]


def signature(function: Any) -> str:
    """Names, kinds and defaults; annotations may improve freely."""
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))[1:-1]


def resolve(dotted: str) -> Any:
    value: Any = deep_gemm
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def test_all_is_exactly_the_frozen_table() -> None:
    expected = {*SIGNATURES, *CLASSES, *MODULES, *UNAVAILABLE, "__version__"}
    assert set(deep_gemm.__all__) == expected
    assert len(deep_gemm.__all__) == len(expected)
    assert set(deep_gemm.__all__) <= set(dir(deep_gemm))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_frozen(name: str) -> None:
    function = getattr(deep_gemm, name)
    assert signature(function) == SIGNATURES[name]
    assert inspect.getdoc(function), f"{name} has no docstring"


def test_c120_old_names_and_a_version() -> None:
    assert deep_gemm.__version__ == "0.1.0"
    assert isinstance(deep_gemm.jit, types.ModuleType)
    for letters in ("nt", "nn", "tn", "tt"):
        alias, function = f"fp8_fp4_gemm_{letters}", f"fp8_gemm_{letters}"
        assert getattr(deep_gemm, alias) is getattr(deep_gemm, function)
    masked = deep_gemm.m_grouped_fp8_gemm_nt_masked
    assert deep_gemm.fp8_m_grouped_gemm_nt_masked is masked
    assert deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked is masked
    for letters in ("nt", "nn"):
        alias = getattr(deep_gemm, f"m_grouped_fp8_fp4_gemm_{letters}_contiguous")
        assert alias is getattr(deep_gemm, f"m_grouped_fp8_gemm_{letters}_contiguous")
    assert deep_gemm.bf16_m_grouped_gemm_nt_masked is deep_gemm.m_grouped_bf16_gemm_nt_masked


@pytest.mark.parametrize("name", TRANSFORMERS_LOADER)
def test_names_that_transformers_demands(name: str) -> None:
    assert callable(resolve(name))


@pytest.mark.parametrize("name", sorted(UNAVAILABLE))
def test_unavailable_names_raise_when_called(name: str) -> None:
    assert hasattr(deep_gemm, name)
    with pytest.raises(NotImplementedError) as caught:
        getattr(deep_gemm, name)(1, 2, anything=3)
    assert str(caught.value).startswith(name) and len(str(caught.value)) > len(name) + 30


@pytest.mark.parametrize("name", NOT_IMPLEMENTED)
def test_hasattr_tells_the_truth(name: str) -> None:
    assert not hasattr(deep_gemm, name)
    with pytest.raises(AttributeError, match=f"{deep_gemm.__version__}.*{name}.*__all__"):
        getattr(deep_gemm, name)
    with pytest.raises(ImportError):
        exec(f"from deep_gemm import {name}")


@pytest.mark.parametrize(
    "module, names",
    [
        ("utils", "align ceil_div get_tma_aligned_size per_token_cast_to_fp8 init_dist"),
        ("utils.math", "ceil_div ceil_to_ue8m0 per_block_cast_to_fp8 per_token_cast_to_fp4"),
        ("utils.layout", "get_mn_major_tma_aligned_tensor transform_sf_into_required_layout"),
        ("utils.dist", "init_dist uneven_all_gather dist_print"),
        ("testing", "bench bench_kineto calc_diff count_bytes assert_bitwise_equal"),
        ("testing", "get_arch_major test_filter ignore_env compare"),
        ("testing.bench", "bench bench_kineto"),
        ("testing.numeric", "calc_diff count_bytes"),
        ("legacy", "gemm_fp8_fp8_bf16_nt m_grouped_gemm_fp8_fp8_bf16_nt_contiguous"),
        ("legacy", "m_grouped_gemm_fp8_fp8_bf16_nt_masked"),
        ("jit_kernels", "gemm_fp8_fp8_bf16_nt get_num_sms"),
        ("jit_kernels.gemm", "gemm_fp8_fp8_bf16_nt get_best_configs"),
        ("jit_kernels.utils", "set_num_sms get_num_sms get_m_alignment_for_contiguous_layout"),
        ("jit_kernels.utils", "ceil_div get_col_major_tma_aligned_tensor get_tma_aligned_size"),
    ],
)
def test_modules_that_clients_import(module: str, names: str) -> None:
    loaded = importlib.import_module(f"deep_gemm.{module}")
    for name in names.split():
        assert callable(getattr(loaded, name))
        assert getattr(deep_gemm, name, None) in (None, getattr(loaded, name))


def test_everything_of_utils_is_at_top_level() -> None:
    for name in deep_gemm.utils.__all__:
        assert getattr(deep_gemm, name) is getattr(deep_gemm.utils, name)


# Use on a CPU


def operands(m: int, n: int, k: int) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    a = deep_gemm.per_token_cast_to_fp8(torch.randn(m, k), use_ue8m0=False)
    b = deep_gemm.per_block_cast_to_fp8(torch.randn(n, k), use_ue8m0=False)
    return a, b, torch.full((m, n), float("nan"), dtype=torch.bfloat16)


def test_every_form_of_the_call_gives_the_same_bits() -> None:
    (a, sfa), (b, sfb), expected = operands(33, 256, 384)
    deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), expected)
    assert not expected.isnan().any()
    a_t, b_t = (a.t(), sfa.t()), (b.t(), sfb.t())

    def same(call: Any, *arguments: Any, **keywords: Any) -> None:
        d = torch.full_like(expected, float("nan"))
        name = "out" if call is deep_gemm.gemm_fp8_fp8_bf16_nt else "d"
        assert call(*arguments, **{name: d}, **keywords) is None
        deep_gemm.testing.assert_bitwise_equal(d, expected)

    same(deep_gemm.fp8_gemm_nt, [a, sfa], [b, sfb], c=None)
    same(deep_gemm.fp8_gemm_nt, (a, sfa), (b, sfb), recipe=(1, 128, 128), compiled_dims="mnk")
    same(deep_gemm.fp8_gemm_nt, (a, sfa), (b, sfb), recipe_a=(1, 128), recipe_b=(128, 128))
    same(deep_gemm.fp8_gemm_nt, (a, sfa), (b, sfb), disable_ue8m0_cast=True)
    same(deep_gemm.fp8_gemm_nn, (a, sfa), b_t)
    same(deep_gemm.fp8_gemm_tn, a_t, b_t)
    same(deep_gemm.fp8_gemm_tt, a_t, (b, sfb))
    same(deep_gemm.gemm_fp8_fp8_bf16_nt, [a, sfa], [b, sfb])
    positional = torch.empty_like(expected)
    deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), positional, None)
    deep_gemm.testing.assert_bitwise_equal(positional, expected)


def test_errors_of_the_call_come_from_the_checks() -> None:
    a, b, d = operands(33, 256, 384)
    with pytest.raises(TypeError, match="a is a Tensor, expected a pair"):
        deep_gemm.fp8_gemm_nt(a[0], b, d)
    with pytest.raises(TypeError, match="b is a NoneType, expected a pair"):
        deep_gemm.fp8_gemm_nn(a, None, d)
    with pytest.raises(TypeError, match="d is a NoneType"):
        deep_gemm.fp8_gemm_nt(a, b, None)
    with pytest.raises(ValueError, match="recipe is 128"):
        deep_gemm.fp8_gemm_nt(a, b, d, recipe=128)
    with pytest.raises(ValueError, match="compiled_dims is 'xy'"):
        deep_gemm.fp8_gemm_nt(a, b, d, compiled_dims="xy")
    with pytest.raises(TypeError, match="compiled_dims is a int"):
        deep_gemm.fp8_gemm_nt(a, b, d, compiled_dims=3)
    with pytest.raises(NotImplementedError, match="packed FP4"):
        deep_gemm.fp8_fp4_gemm_nt(a, (b[0].view(torch.int8), b[1]), d)
    with pytest.raises(ValueError, match="b is not K-major"):
        deep_gemm.fp8_gemm_nn(a, (b[0].t().contiguous(), b[1].t()), d)
    with pytest.raises(ValueError, match="a is not K-major"):
        deep_gemm.fp8_gemm_tn((a[0].t().contiguous(), a[1].t()), (b[0].t(), b[1].t()), d)


def test_get_best_configs_has_the_form_of_2025() -> None:
    from deep_gemm.jit_kernels.gemm import get_best_configs

    grid, block_m, block_n, stages, multicast, smem = get_best_configs(4096, 7168, 2048, 1, 132)
    assert 0 < grid <= 132 and block_m % 64 == 0 and block_n % 8 == 0 and stages >= 2
    assert multicast[0] in (1, 2) and isinstance(multicast[1], bool)
    assert 0 < smem[0] <= 232448
    for layout in ({"is_grouped_contiguous": True}, {"is_grouped_masked": True}):
        grid, block_m, *_, smem = get_best_configs(512, 7168, 2048, 4, 132, **layout)
        assert grid == 132 and block_m % 64 == 0 and 0 < smem[0] <= 232448
    with pytest.raises(ValueError, match="num_groups=4.*expected one of the two layouts"):
        get_best_configs(4096, 7168, 2048, 4, 132)
    with pytest.raises(NotImplementedError, match="is_wgrad=True"):
        get_best_configs(4096, 7168, 2048, 1, 132, is_wgrad=True)


# Settings


def test_num_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert deep_gemm.get_num_sms() == 132
    deep_gemm.set_num_sms(100)
    assert deep_gemm.get_num_sms() == 100
    deep_gemm.set_num_sms(0)
    assert deep_gemm.get_num_sms() == 132
    with pytest.raises(ValueError, match="num_sms is -1, expected 0 or more"):
        deep_gemm.set_num_sms(-1)
    with pytest.raises(TypeError, match=r"num_sms is 1\.5, expected an int"):
        deep_gemm.set_num_sms(1.5)  # type: ignore[arg-type]


def test_num_sms_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "is_available": True,
        "is_initialized": True,
        "current_device": 1,
        "get_device_name": "NVIDIA H20",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(driver, "device_properties", lambda index: ((132, 78)[index], (9, 0)))
    assert deep_gemm.get_num_sms() == 78
    deep_gemm.set_num_sms(78)
    with pytest.raises(ValueError, match="num_sms is 79, expected 0 to 78, the SMs of NVIDIA H20"):
        deep_gemm.set_num_sms(79)
    assert deep_gemm.get_num_sms() == 78


def test_other_settings() -> None:
    assert deep_gemm.get_pdl() is False
    deep_gemm.set_pdl(True)
    assert deep_gemm.get_pdl() is True
    assert deep_gemm.get_tc_util() == 100
    deep_gemm.set_tc_util(40)
    assert deep_gemm.get_tc_util() == 40
    with pytest.raises(ValueError, match="tc_util is 101, expected 0 to 100"):
        deep_gemm.set_tc_util(101)
    deep_gemm.set_ignore_compile_dims(True)
    deep_gemm.set_block_size_multiple_of(64)
    deep_gemm.set_block_size_multiple_of((64, 128))
    with pytest.raises(ValueError, match="multiple_of is 0"):
        deep_gemm.set_block_size_multiple_of((64, 0))
    with pytest.raises(ValueError, match="or two, for"):
        deep_gemm.set_block_size_multiple_of((64, 128, 8))  # type: ignore[arg-type]
    deep_gemm.init("/somewhere", "/usr/local/cuda")


def test_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DG_BACKEND", raising=False)
    assert deep_gemm.get_backend() == "auto"
    monkeypatch.setenv("DG_BACKEND", "reference")
    assert deep_gemm.get_backend() == "reference"
    deep_gemm.set_backend("sm90")
    assert deep_gemm.get_backend() == "sm90"
    deep_gemm.set_backend(None)
    assert deep_gemm.get_backend() == "reference"
    with pytest.raises(ValueError, match="'cuda', expected one of auto, sm90, reference"):
        deep_gemm.set_backend("cuda")  # type: ignore[arg-type]
    monkeypatch.setenv("DG_BACKEND", "blackwell")
    with pytest.raises(ValueError, match="DG_BACKEND"):
        deep_gemm.get_backend()
