"""What the grouped calls refuse, with which exception and words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import deep_gemm

FP8 = torch.float8_e4m3fn
NT = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
NN = deep_gemm.m_grouped_fp8_gemm_nn_contiguous
MASKED = deep_gemm.m_grouped_fp8_gemm_nt_masked
G, M, N, K = 3, 256, 264, 272
M_MAX = 40


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(FP8)


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return fp8(G, N, K), torch.ones(G, 3, 3)


def contiguous() -> dict[str, Any]:
    return {
        "a": (fp8(M, K), torch.ones(M, 3)),
        "b": weights(),
        "d": torch.empty(M, N, dtype=torch.bfloat16),
        "grouped_layout": int32([0] * 128 + [2] * 100 + [-1] * 28),
    }


def psum() -> dict[str, Any]:
    ends = {"grouped_layout": int32([100, 100, 200]), "use_psum_layout": True}
    return contiguous() | ends


def masked() -> dict[str, Any]:
    return {
        "a": (fp8(G, M_MAX, K), torch.ones(G, M_MAX, 3)),
        "b": weights(),
        "d": torch.empty(G, M_MAX, N, dtype=torch.bfloat16),
        "masked_m": int32([3, 0, M_MAX]),
        "expected_m": 10,
    }


CALLS = {"ids": (NT, contiguous), "psum": (NT, psum), "masked": (MASKED, masked)}


@pytest.fixture(params=CALLS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def refuse(kind: str, error: type[Exception], *words: str, **changed: Any) -> None:
    """The call with `changed` arguments raises `error` with `words`, and writes nothing."""
    function, operands = CALLS[kind]
    arguments = operands()
    arguments["d"].view(torch.int16).fill_(-1)
    arguments |= changed
    with pytest.raises(error) as caught:
        function(**arguments)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
    if "d" not in changed:
        assert bool((arguments["d"].view(torch.int16) == -1).all())


def layout_name(kind: str) -> str:
    return "masked_m" if kind == "masked" else "grouped_layout"


def test_these_arguments_are_accepted(kind: str) -> None:
    function, operands = CALLS[kind]
    assert function(**operands()) is None


# Layouts


def test_refuses_int64_with_the_remedy(kind: str) -> None:
    name = layout_name(kind)
    layout = CALLS[kind][1]()[name].long()
    words = f"{name} has dtype torch.int64, expected torch.int32", f"{name}.int()"
    refuse(kind, TypeError, *words, **{name: layout})
    if kind != "masked":
        refuse(kind, TypeError, "torch.int64", grouped_layout=None, m_indices=layout)


def test_refuses_other_dtypes(kind: str) -> None:
    name = layout_name(kind)
    layout = CALLS[kind][1]()[name]
    for other in (layout.short(), layout.float(), layout.bool()):
        refuse(kind, TypeError, f"{name} has dtype {other.dtype}", **{name: other})


def test_refuses_what_is_no_tensor(kind: str) -> None:
    name = layout_name(kind)
    layout = CALLS[kind][1]()[name]
    refuse(kind, TypeError, f"{name} is a list, expected a torch.Tensor", **{name: layout.tolist()})


def test_refuses_a_layout_of_the_wrong_shape(kind: str) -> None:
    name = layout_name(kind)
    layout = CALLS[kind][1]()[name]
    expected = f"expected ({M if kind == 'ids' else G},)"
    for wrong in (layout[:-1], torch.cat([layout, layout[-1:]]), layout[None], layout[:, None]):
        got = f"{name} has shape {tuple(wrong.shape)}"
        refuse(kind, ValueError, got, expected, **{name: wrong})
    refuse(kind, ValueError, f"{name} has shape ()", expected, **{name: layout[0]})


def test_refuses_ids_in_place_of_ends_and_the_reverse() -> None:
    refuse("ids", ValueError, "grouped_layout has shape (3,)", grouped_layout=int32([1, 2, 3]))
    ids = contiguous()["grouped_layout"]
    refuse("psum", ValueError, f"grouped_layout has shape ({M},)", grouped_layout=ids)


def test_refuses_a_layout_with_gaps(kind: str) -> None:
    name = layout_name(kind)
    layout = CALLS[kind][1]()[name]
    wrong = layout.repeat_interleave(2)[::2]
    refuse(kind, ValueError, name, "stride", "contiguous()", **{name: wrong})


def test_refuses_a_layout_on_another_device(kind: str) -> None:
    name = layout_name(kind)
    layout = CALLS[kind][1]()[name].to("meta")
    refuse(kind, ValueError, f"{name} is on meta, expected cpu", **{name: layout})


def test_wants_one_name_of_the_layout() -> None:
    layout = contiguous()["grouped_layout"]
    words = "grouped_layout", "m_indices"
    for function in (NT, NN):
        a, b, d, _ = contiguous().values()
        if function is NN:
            b = tuple(each.mT for each in b)
        with pytest.raises(TypeError) as caught:
            function(a, b, d)
        assert all(word in str(caught.value) for word in words)
        with pytest.raises(TypeError) as caught:
            function(a, b, d, layout, m_indices=layout)
        assert all(word in str(caught.value) for word in words)


# Values


@pytest.mark.parametrize("value", [G, 2**30, -2, -(2**31)])
def test_refuses_an_id_that_is_no_group(value: int) -> None:
    ids = contiguous()["grouped_layout"]
    ids[130] = value
    refuse("ids", ValueError, f"grouped_layout[130] is {value}", "-1", grouped_layout=ids)


def test_refuses_two_groups_in_a_block() -> None:
    ids = contiguous()["grouped_layout"]
    ids[140] = 1
    refuse("ids", ValueError, "grouped_layout[140] is 1", "expected 2", grouped_layout=ids)
    deep_gemm.set_mk_alignment_for_contiguous_layout(16)
    ids = int32([0] * 16 + [1] * 240)
    NT(**contiguous() | {"grouped_layout": ids})  # not in one block any more
    deep_gemm.set_mk_alignment_for_contiguous_layout(32)
    refuse("ids", ValueError, "grouped_layout[16] is 1", "32", grouped_layout=ids)


def test_a_group_may_come_in_several_places() -> None:
    NT(**contiguous() | {"grouped_layout": int32([1] * 128 + [0] * 127 + [-1])})
    deep_gemm.set_mk_alignment_for_contiguous_layout(64)
    NT(**contiguous() | {"grouped_layout": int32([1] * 64 + [0] * 64 + [1] * 64 + [-1] * 64)})


@pytest.mark.parametrize(
    "ends, words",
    [
        ([100, 99, 200], "grouped_layout[1] is 99"),
        ([100, 200, 100], "grouped_layout[2] is 100"),
        ([-1, 100, 200], "grouped_layout[0] is -1"),
        ([100, 200, 257], "grouped_layout[2] is 257"),
        ([2**31 - 1] * 3, "grouped_layout[0] is 2147483647"),
    ],
)
def test_refuses_ends_out_of_order_or_range(ends: list[int], words: str) -> None:
    refuse("psum", ValueError, words, "expected", grouped_layout=int32(ends))


@pytest.mark.parametrize("ends", [[0, 0, 0], [256, 256, 256], [0, 0, 256], [1, 128, 129]])
def test_accepts_ends_at_the_limits(ends: list[int]) -> None:
    NT(**psum() | {"grouped_layout": int32(ends)})


@pytest.mark.parametrize("count", [M_MAX + 1, -1, 2**31 - 1])
def test_refuses_a_count_out_of_range(count: int) -> None:
    words = f"masked_m[1] is {count}", f"{M_MAX}"
    refuse("masked", ValueError, *words, masked_m=int32([3, count, 4]))


def test_values_are_checked_by_every_name() -> None:
    ids = contiguous()["grouped_layout"]
    ids[130] = 7
    a, b, d, _ = contiguous().values()
    transposed = tuple(each.mT for each in b)
    for call in (
        lambda: NT(a, b, d, m_indices=ids),
        lambda: NN(a, transposed, d, ids),
        lambda: deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, ids),
        lambda: deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(a, b, d, ids),
    ):
        with pytest.raises(ValueError, match=re.escape("[130] is 7")):
            call()


# The alignment


def test_any_alignment_can_be_set_but_ids_need_a_multiple_of_16() -> None:
    for alignment in (1, 8, 100):
        deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
        assert deep_gemm.get_mk_alignment_for_contiguous_layout() == alignment
        assert deep_gemm.get_m_alignment_for_contiguous_layout() == alignment
        NT(**psum())
        refuse("ids", ValueError, f"alignment of groups is {alignment}", "multiple of 16")


@pytest.mark.parametrize("alignment", [0, -1, -16])
def test_refuses_an_alignment_below_1(alignment: int) -> None:
    with pytest.raises(ValueError, match=f"alignment is {alignment}, expected"):
        deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)


# Operands


def test_refuses_what_is_no_pair(kind: str) -> None:
    arguments = CALLS[kind][1]()
    refuse(kind, TypeError, "a is a Tensor, expected a pair", a=arguments["a"][0])
    refuse(kind, TypeError, "b is a tuple of 1 items", b=arguments["b"][:1])
    refuse(kind, TypeError, "sfb is a NoneType", b=(arguments["b"][0], None))
    refuse(kind, TypeError, "d is a NoneType", d=None)


def test_refuses_wrong_dtypes(kind: str) -> None:
    (a, sfa), (b, sfb), d = list(CALLS[kind][1]().values())[:3]
    refuse(kind, TypeError, "a has dtype torch.bfloat16", a=(a.bfloat16(), sfa))
    refuse(kind, TypeError, "b has dtype torch.float8_e5m2", b=(b.view(torch.float8_e5m2), sfb))
    refuse(kind, TypeError, "sfa has dtype torch.float64", a=(a, sfa.double()))
    refuse(kind, TypeError, "sfb has dtype torch.int32", b=(b, sfb.int()))
    refuse(kind, TypeError, "d has dtype torch.float16, expected torch.bfloat16", d=d.half())


def test_refuses_what_comes_later_or_never(kind: str) -> None:
    b, sfb = weights()
    later = NotImplementedError
    refuse(kind, later, "packed FP4", b=(b.view(torch.int8), sfb))
    refuse(kind, later, "recipe=(1, 1, 128)", recipe=(1, 1, 128))
    refuse(kind, later, "recipe_a=(1, 32)", recipe_a=(1, 32), recipe_b=(1, 32))


def test_refuses_options_that_make_no_sense(kind: str) -> None:
    refuse(kind, ValueError, "recipe is (1, 128), expected", recipe=(1, 128))
    refuse(kind, ValueError, "recipe_a is given without recipe_b", recipe_a=(1, 128))
    refuse(kind, ValueError, "compiled_dims is 'xyz'", compiled_dims="xyz")


def test_refuses_wrong_ranks(kind: str) -> None:
    (a, sfa), (b, sfb), d = list(CALLS[kind][1]().values())[:3]
    rank = a.dim()
    refuse(kind, ValueError, f"a has {rank + 1} dimensions", f"expected {rank}", a=(a[None], sfa))
    refuse(kind, ValueError, f"sfa has {rank - 1} dimensions", a=(a, sfa[0]))
    refuse(kind, ValueError, f"d has {rank - 1} dimensions", d=d[0])
    refuse(kind, ValueError, "b has 2 dimensions", "expected 3", b=(b[0], sfb))
    refuse(kind, ValueError, "sfb has 2 dimensions", b=(b, sfb[0]))


def test_refuses_wrong_shapes(kind: str) -> None:
    (a, sfa), (b, sfb), d = list(CALLS[kind][1]().values())[:3]
    rows = f"{G}, {M_MAX}" if kind == "masked" else f"{M}"
    refuse(kind, ValueError, "b has shape (3, 264, 256)", "272", b=(b[..., :256], sfb))
    refuse(kind, ValueError, f"d has shape ({rows}, 256)", f"({rows}, 264)", d=d[..., :256])
    refuse(kind, ValueError, "d has shape", f"expected ({rows}, 264)", d=d[:-1])
    refuse(kind, ValueError, f"sfa has shape ({rows}, 2)", f"({rows}, 3)", a=(a, sfa[..., :2]))
    refuse(kind, ValueError, "sfb has shape (3, 2, 3), expected (3, 3, 3)", b=(b, sfb[:, :2]))
    refuse(kind, ValueError, "sfb has shape (2, 3, 3), expected (3, 3, 3)", b=(b, sfb[:2]))


def test_refuses_another_number_of_groups() -> None:
    b, sfb = weights()
    refuse("masked", ValueError, "b has shape (2, 264, 272)", "(3, ", b=(b[:2], sfb[:2]))
    refuse("psum", ValueError, "grouped_layout has shape (3,), expected (2,)", b=(b[:2], sfb[:2]))


def test_refuses_sizes_that_tma_cannot_move(kind: str) -> None:
    (a, sfa), (b, sfb), d = list(CALLS[kind][1]().values())[:3]
    narrow = {"b": (b[:, :260], sfb), "d": d[..., :260]}
    refuse(kind, ValueError, "n is 260, expected a multiple of 8", "264", **narrow)
    short = {"a": (a[..., :264], sfa), "b": (b[..., :264], sfb)}
    refuse(kind, ValueError, "k is 264, expected a multiple of 16", "272", **short)


def test_refuses_groups_with_gaps() -> None:
    sfa, sfb = masked()["a"][1], weights()[1]
    wide = fp8(G, N + 8, K)[:, :N]
    for kind in CALLS:
        refuse(kind, ValueError, "b has strides", "stride(0)", "contiguous()", b=(wide, sfb))
    refuse("masked", ValueError, "a has strides", a=(fp8(G, M_MAX + 8, K)[:, :M_MAX], sfa))
    wide_d = torch.empty(G, M_MAX + 8, N, dtype=torch.bfloat16)[:, :M_MAX]
    refuse("masked", ValueError, "d has strides", d=wide_d)
    same = fp8(1, M_MAX, K).expand(G, M_MAX, K)
    refuse("masked", ValueError, "a has strides", a=(same, sfa))


def test_refuses_fp8_that_is_not_k_major(kind: str) -> None:
    (a, sfa), (b, sfb), _ = list(CALLS[kind][1]().values())[:3]
    refuse(kind, ValueError, "K-major", a=(a.mT.contiguous().mT, sfa))
    refuse(kind, ValueError, "K-major", b=(b.mT.contiguous().mT, sfb))


def test_the_nn_form_wants_transposed_views() -> None:
    arguments = contiguous()
    b, sfb = arguments.pop("b")
    NN(b=(b.mT, sfb.mT), **arguments)
    with pytest.raises(ValueError, match="b is not K-major"):
        NN(b=(b.mT.contiguous(), sfb.mT), **arguments)
    with pytest.raises(ValueError, match="b has shape"):
        NN(b=(b, sfb), **arguments)


def test_refuses_strides_and_addresses_that_tma_cannot_follow(kind: str) -> None:
    (a, sfa), (b, sfb), d = list(CALLS[kind][1]().values())[:3]
    odd = torch.nn.functional.pad(a.view(torch.uint8), (0, 8)).view(FP8)[..., :K]
    refuse(kind, ValueError, "a has row stride 280", "multiple of 16", a=(odd, sfa))
    odd = torch.nn.functional.pad(b.view(torch.uint8), (0, 8)).view(FP8)[..., :K]
    refuse(kind, ValueError, "b has row stride 280", b=(odd, sfb))
    odd = torch.nn.functional.pad(d, (0, 4))[..., :N]
    refuse(kind, ValueError, "d has row stride 268", "multiple of 8", d=odd)
    shifted = torch.nn.functional.pad(b.view(torch.uint8), (8, 8)).view(FP8)[..., 8 : 8 + K]
    refuse(kind, ValueError, "b starts at address", b=(shifted, sfb))


def test_refuses_a_mix_of_devices(kind: str) -> None:
    (a, sfa), (b, sfb), d = list(CALLS[kind][1]().values())[:3]
    refuse(kind, ValueError, "sfa is on meta, expected cpu", a=(a, sfa.to("meta")))
    refuse(kind, ValueError, "b is on meta", b=(b.to("meta"), sfb))
    refuse(kind, ValueError, "d is on meta", d=d.to("meta"))


def test_refuses_weight_scales_with_gaps(kind: str) -> None:
    b, _ = weights()
    refuse(kind, ValueError, "sfb has strides", b=(b, torch.ones(G, 3, 8)[..., :3]))
    refuse(kind, ValueError, "sfb has strides", b=(b, torch.ones(1, 3, 3).expand(G, 3, 3)))


def test_refuses_output_over_an_input(kind: str) -> None:
    (a, sfa), _, d = list(CALLS[kind][1]().values())[:3]
    data = d.view(torch.uint8).view(FP8).flatten()
    over = data[: a.numel()].view(a.shape)
    refuse(kind, ValueError, "d shares memory with a", a=(over, sfa), d=d)


def test_views_with_gaps_near_the_output_are_no_crash(kind: str) -> None:
    function, operands = CALLS[kind]
    a, sfa = operands()["a"]
    *leading, _ = a.shape
    buffer = torch.zeros(*leading, 1024, dtype=torch.uint8)
    wide = {"a": (buffer[..., :K].view(FP8), sfa)}
    beside = buffer.view(torch.bfloat16)[..., 248 : 248 + N]
    function(**operands() | wide | {"d": beside})
    over = buffer.view(torch.bfloat16).flatten()[: beside.numel()].view(beside.shape)
    try:  # found or trusted, but explained
        function(**operands() | wide | {"d": over})
    except ValueError as error:
        assert "d shares memory with a" in str(error)


@pytest.mark.parametrize("expected_m", [1.5, "8", None, torch.tensor(3)])
def test_refuses_hints_that_are_no_int(expected_m: Any) -> None:
    refuse("masked", TypeError, "expected_m is", "expected an int", expected_m=expected_m)
    if expected_m is not None:
        name = "expected_m_for_psum_layout"
        refuse("psum", TypeError, f"{name} is", "expected an int", **{name: expected_m})


def test_strides_of_single_rows_and_groups_do_not_matter() -> None:
    a = fp8(K).as_strided((1, 1, K), (7, 5, 1))
    d = torch.empty(N, dtype=torch.bfloat16).as_strided((1, 1, N), (3, 2, 1))
    b = fp8(N, K).as_strided((1, N, K), (11, K, 1))
    MASKED((a, torch.ones(1, 1, 3)), (b, torch.ones(1, 3, 3)), d, int32([1]), 1)
    assert not d.any()
    a = fp8(G, K).as_strided((G, 1, K), (K, 5, 1))
    d = torch.ones(G, N, dtype=torch.bfloat16).as_strided((G, 1, N), (N, 3, 1))
    MASKED((a, torch.ones(G, 1, 3)), weights(), d, int32([1, 0, 1]), 1)
    assert not d[[0, 2]].any() and bool((d[1] == 1).all())
