"""checks.py: what is refused, with which exception and words, and what is described how."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import checks, driver
from deep_gemm.types import Problem

FP8 = torch.float8_e4m3fn


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(FP8)


def operands(m: int = 64, n: int = 256, k: int = 384) -> dict[str, Any]:
    return {
        "a": (fp8(m, k), torch.ones(m, ceil_div(k, 128))),
        "b": (fp8(n, k), torch.ones(ceil_div(n, 128), ceil_div(k, 128))),
        "d": torch.empty(m, n, dtype=torch.bfloat16),
    }


def refuse(error: type[Exception], *words: str, **changed: Any) -> None:
    """The call with `changed` arguments raises `error` with `words`, and `can_run` is False."""
    arguments = operands() | changed
    with pytest.raises(error) as caught:
        checks.check_dense(**arguments)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
    assert not checks.can_run(**arguments)


def test_describes_a_plain_problem() -> None:
    problem = checks.check_dense(**operands(m=64, n=256, k=384))
    assert problem == Problem("dense", 64, 256, 384, "cpu", 384, 384, 256, (3, 1))
    assert checks.can_run(**operands())


def test_describes_padded_rows_and_transposed_scales() -> None:
    arguments = operands()
    arguments["a"] = (fp8(64, 512)[:, :384], torch.ones(3, 64).t())
    arguments["b"] = [fp8(256, 400)[:, :384], torch.ones(3, 2).t()]
    arguments["d"] = torch.empty(64, 264, dtype=torch.bfloat16)[:, :256]
    problem = checks.check_dense(**arguments)
    assert problem == Problem("dense", 64, 256, 384, "cpu", 512, 400, 264, (1, 2))


@pytest.mark.parametrize(
    "recipes",
    [
        {"recipe": (1, 128, 128)},
        {"recipe": [1, 128, 128]},
        {"recipe_a": (1, 128), "recipe_b": (128, 128)},
    ],
)
def test_accepts_every_spelling_of_the_recipe(recipes: dict[str, Any]) -> None:
    assert checks.check_dense(**operands(), **recipes) == checks.check_dense(**operands())


def test_refuses_what_is_no_pair_of_tensors() -> None:
    data, scales = operands()["a"]
    refuse(TypeError, "a is a Tensor, expected a pair", "per_token_cast_to_fp8", a=data)
    refuse(TypeError, "a is a tuple of 3 items", a=(data, scales, None))
    refuse(TypeError, "sfb is a NoneType, expected a torch.Tensor", b=(data, None))
    refuse(TypeError, "d is a NoneType", d=None)


def test_refuses_wrong_dtypes() -> None:
    (a, sfa), (b, sfb), d = operands().values()
    refuse(
        TypeError,
        "a has dtype torch.bfloat16, expected torch.float8_e4m3fn; per_token_cast_to_fp8",
        a=(a.bfloat16(), sfa),
    )
    refuse(TypeError, "b has dtype torch.float8_e5m2", b=(b.view(torch.float8_e5m2), sfb))
    refuse(TypeError, "sfa has dtype torch.float64", "sfa.float()", a=(a, sfa.double()))
    refuse(TypeError, "sfa has dtype torch.int32", "unpack_ue8m0_from_int", a=(a, sfa.int()))
    refuse(TypeError, "sfb has dtype torch.uint8", b=(b, sfb.to(torch.uint8)))
    refuse(TypeError, "d has dtype torch.float16, expected torch.bfloat16", d=d.half())


def test_refuses_what_comes_later_or_never() -> None:
    (_, _), (b, sfb), d = operands().values()
    later = NotImplementedError
    refuse(later, "d has dtype torch.float32, expected torch.bfloat16", d=d.float())
    refuse(later, "c is given, expected None", c=d)
    refuse(later, "recipe=(1, 1, 128) is not supported", recipe=(1, 1, 128))
    refuse(later, "recipe=(1, 32, 32)", recipe=(1, 32, 32))
    refuse(later, "recipe_a=(1, 32)", recipe_a=(1, 32), recipe_b=(1, 32))
    refuse(later, "packed FP4", "SM100", b=(b.view(torch.int8), sfb))


def test_refuses_malformed_recipes() -> None:
    refuse(ValueError, "recipe is (1, 128), expected None or 3 sizes", recipe=(1, 128))
    refuse(ValueError, "recipe is 128", recipe=128)
    refuse(ValueError, "recipe_a is (1, 0)", recipe_a=(1, 0), recipe_b=(128, 128))
    refuse(ValueError, "recipe_a is given without recipe_b", recipe_a=(1, 128))
    refuse(ValueError, "recipe_b is given without recipe_a", recipe_b=(128, 128))
    both = {"recipe_a": (1, 128), "recipe_b": (128, 128), "recipe": (1, 128, 128)}
    refuse(ValueError, "leave recipe out", **both)


def test_refuses_wrong_ranks_and_shapes() -> None:
    (a, sfa), (b, sfb), d = operands().values()
    refuse(ValueError, "a has 3 dimensions, shape (1, 64, 384), expected 2", a=(a[None], sfa))
    refuse(ValueError, "sfb has 1 dimensions", b=(b, sfb[0]))
    refuse(ValueError, "b has shape (256, 368), expected (256, 384)", b=(b[:, :368], sfb))
    refuse(ValueError, "d has shape (63, 256), expected (64, 256) = (m, n)", d=d[:63])
    refuse(
        ValueError,
        "sfa has shape (64, 2), expected (64, 3) = (m, ceil(k / 128)) for m = 64, k = 384; "
        "per_token_cast_to_fp8 makes it",
        a=(a, sfa[:, :2]),
    )
    refuse(ValueError, "sfa has shape (3, 64)", "pass sfa.t()", a=(a, sfa.t()))
    refuse(ValueError, "sfb has shape (256, 3), expected (2, 3)", b=(b, torch.ones(256, 3)))
    refuse(ValueError, "sfb has shape (3, 2)", "pass sfb.t()", b=(b, sfb.t()))


def test_refuses_sizes_that_tma_cannot_move() -> None:
    refuse(ValueError, "n is 252, expected a multiple of 8", "256", **operands(n=252))
    refuse(ValueError, "k is 392, expected a multiple of 16", "400", **operands(k=392))
    huge = {
        "a": (torch.empty(2**31, 16, dtype=FP8, device="meta"), torch.ones(1, 1)),
        "b": (fp8(8, 16), torch.ones(1, 1)),
        "d": torch.empty(2**31, 8, dtype=torch.bfloat16, device="meta"),
    }
    refuse(ValueError, "expected each below 2**31", **huge)


def test_refuses_a_mix_of_devices_by_name() -> None:
    (a, sfa), (b, sfb), d = operands().values()
    refuse(ValueError, "sfa is on meta, expected cpu", "sfa.to('cpu')", a=(a, sfa.to("meta")))
    refuse(ValueError, "b is on meta", b=(b.to("meta"), sfb))
    refuse(ValueError, "sfb is on meta", b=(b, sfb.to("meta")))
    refuse(ValueError, "d is on meta", d=d.to("meta"))


def test_refuses_fp8_that_is_not_k_major() -> None:
    (_, sfa), (_, sfb), _ = operands().values()
    words = ("is not K-major", "K-major only", "contiguous() is K-major")
    refuse(ValueError, "a is not K-major: as [m, k]", *words, a=(fp8(384, 64).t(), sfa))
    refuse(ValueError, "b is not K-major: as [n, k]", *words, b=(fp8(384, 256).t(), sfb))


def test_refuses_strides_that_tma_cannot_follow() -> None:
    (_, sfa), (_, sfb), _ = operands().values()
    refuse(ValueError, "a has row stride 392", "multiple of 16", a=(fp8(64, 392)[:, :384], sfa))
    refuse(ValueError, "b has row stride 0", b=(fp8(1, 384).expand(256, 384), sfb))
    d = torch.empty(64, 260, dtype=torch.bfloat16)[:, :256]
    refuse(ValueError, "d has row stride 260", "multiple of 8 elements", d=d)
    d = torch.empty(256, 64, dtype=torch.bfloat16).t()
    refuse(ValueError, "d has strides (1, 64), expected stride 1 in the last dimension", d=d)


def test_refuses_unaligned_addresses() -> None:
    (_, sfa), (_, sfb), _ = operands().values()
    refuse(ValueError, "a starts at address 0x", "16 elements", a=(fp8(64, 400)[:, 8:392], sfa))
    refuse(ValueError, "b starts at address 0x", "b.clone()", b=(fp8(256, 400)[:, 1:385], sfb))
    d = torch.empty(64 * 256 + 4, dtype=torch.bfloat16)[4:].view(64, 256)
    refuse(ValueError, "d starts at address 0x", "8 elements", d=d)


def test_refuses_output_over_an_input() -> None:
    d = torch.empty(64, 256, dtype=torch.bfloat16)
    (_, sfa), (b, _), _ = operands().values()
    a = d.view(torch.uint8).view(FP8).flatten()[: 64 * 384].view(64, 384)
    refuse(ValueError, "d shares memory with a, expected separate storage", a=(a, sfa), d=d)
    sfb = d.view(torch.float32).flatten()[:6].view(2, 3)
    refuse(ValueError, "d shares memory with sfb", b=(b, sfb), d=d)


def test_neighbours_in_one_buffer_do_not_overlap() -> None:
    buffer = torch.zeros(64 * 384 + 64 * 256 * 2, dtype=torch.uint8)
    arguments = operands()
    arguments["a"] = (buffer[: 64 * 384].view(FP8).view(64, 384), arguments["a"][1])
    arguments["d"] = buffer[64 * 384 :].view(torch.bfloat16).view(64, 256)
    assert checks.can_run(**arguments)


def test_refuses_weight_scales_with_gaps() -> None:
    b = operands()["b"][0]
    refuse(ValueError, "sfb has strides (8, 1)", "sfb.contiguous()", b=(b, torch.ones(2, 8)[:, :3]))
    refuse(ValueError, "sfb has strides (0, 0)", b=(b, torch.ones(1, 1).expand(2, 3)))


def test_ignores_strides_of_single_rows_and_blocks() -> None:
    arguments = {
        "a": (fp8(128).as_strided((1, 128), (3, 1)), torch.ones(1).as_strided((1, 1), (7, 9))),
        "b": (fp8(64, 128), torch.ones(1).as_strided((1, 1), (5, 11))),
        "d": torch.empty(64, dtype=torch.bfloat16).as_strided((1, 64), (1, 1)),
    }
    problem = checks.check_dense(**arguments)
    assert problem == Problem("dense", 1, 64, 128, "cpu", 128, 128, 64, (1, 1))


@pytest.mark.parametrize("sizes", [(0, 256, 384), (64, 0, 384), (64, 256, 0), (0, 0, 0)])
def test_accepts_empty_problems(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    problem = checks.check_dense(**operands(m, n, k))
    assert (problem.m, problem.n, problem.k) == sizes


@given(
    m=st.integers(0, 40),
    n=st.integers(0, 40).map(lambda x: 8 * x),
    k=st.integers(0, 40).map(lambda x: 16 * x),
    pads=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
)
def test_every_aligned_shape_passes(m: int, n: int, k: int, pads: tuple[int, int, int]) -> None:
    blocks = ceil_div(n, 128), ceil_div(k, 128)
    problem = checks.check_dense(
        (fp8(m, k + 16 * pads[0])[:, :k], torch.ones(blocks[1], m).t()),
        (fp8(n, k + 16 * pads[1])[:, :k], torch.ones(blocks)),
        torch.empty(m, n + 8 * pads[2], dtype=torch.bfloat16)[:, :n],
    )
    assert (problem.m, problem.n, problem.k) == (m, n, k)
    assert problem.a_stride % 16 == problem.b_stride % 16 == problem.d_stride % 8 == 0


class TestGpu:
    """Which device is refused; the device itself is a stand-in."""

    device = torch.device("cuda", 0)

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capability = (10, 0)
        monkeypatch.setattr(driver, "device_properties", lambda index: (148, self.capability))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA B200")

    def test_other_gpus_are_refused_by_name(self) -> None:
        with pytest.raises(NotImplementedError) as caught:
            checks.check_gpu(self.device)
        for word in ("cuda:0 is NVIDIA B200", "10.0", "Hopper", 'set_backend("reference")'):
            assert word in str(caught.value)

    def test_hopper_passes(self) -> None:
        self.capability = (9, 0)
        checks.check_gpu(self.device)

    def test_reference_backend_runs_anywhere(self) -> None:
        deep_gemm.set_backend("reference")
        checks.check_gpu(self.device)
        checks.check_gpu(torch.device("meta"))

    def test_other_device_types_are_refused(self) -> None:
        with pytest.raises(NotImplementedError, match=re.escape("expected CUDA (Hopper) or CPU")):
            checks.check_gpu(torch.device("meta"))


def test_problem_is_hashable_and_frozen() -> None:
    problem = checks.check_dense(**operands())
    assert problem in {problem}
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.m = 1  # type: ignore[misc]


def test_a_nested_recipe_is_refused_by_the_call() -> None:
    """It cannot be looked up among remembered launches; the checks have to say what is wrong."""
    a = deep_gemm.per_token_cast_to_fp8(torch.ones(8, 128))
    b = deep_gemm.per_block_cast_to_fp8(torch.ones(8, 128))
    d = torch.empty(8, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="recipe is .* expected None or 3 sizes"):
        deep_gemm.fp8_gemm_nt(a, b, d, recipe=[[1], 128, 128])


def test_parameters_may_be_operands() -> None:
    a = deep_gemm.per_token_cast_to_fp8(torch.ones(8, 128))
    b, sfb = deep_gemm.per_block_cast_to_fp8(torch.ones(8, 128))
    d = torch.empty(8, 8, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(a, (b, torch.nn.Parameter(sfb)), d)
    assert torch.equal(d, torch.full_like(d, 128))


@pytest.mark.parametrize(
    "options",
    [{"compiled_dims": ["n"]}, {"recipe": torch.tensor([1, 128, 128])}],
    ids=["compiled_dims", "recipe"],
)
def test_options_of_the_wrong_kind_are_explained(options: dict[str, Any]) -> None:
    a = deep_gemm.per_token_cast_to_fp8(torch.ones(8, 128))
    b = deep_gemm.per_block_cast_to_fp8(torch.ones(8, 128))
    d = torch.empty(8, 8, dtype=torch.bfloat16)
    assert not checks.can_run(a, b, d, **options)
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(options))} is .* expected"):
        deep_gemm.fp8_gemm_nt(a, b, d, **options)


def test_sparse_tensors_are_refused() -> None:
    a, sfa = deep_gemm.per_token_cast_to_fp8(torch.ones(8, 128))
    b = deep_gemm.per_block_cast_to_fp8(torch.ones(8, 128))
    d = torch.empty(8, 8, dtype=torch.bfloat16)
    assert not checks.can_run((a, sfa.to_sparse()), b, d)
    with pytest.raises(TypeError, match="sfa has layout torch.sparse_coo, expected torch.strided"):
        deep_gemm.fp8_gemm_nt((a, sfa.to_sparse()), b, d)
