"""Scale layouts: MN-major and TMA-aligned, packed UE8M0, required layouts, alignments."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from deep_gemm import jit, layout
from deep_gemm.jit import cubin
from deep_gemm.layout import (
    get_col_major_tma_aligned_tensor,
    get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor,
    get_tma_aligned_size,
    native_sfa,
    transform_sf_into_required_layout,
)

GROUPS = [None, 1, 2, 3]


def make(groups: int | None, mn: int, num_k_blocks: int) -> torch.Tensor:
    shape = (mn, num_k_blocks) if groups is None else (groups, mn, num_k_blocks)
    return torch.rand(shape) + 0.5


def variants(sf: torch.Tensor) -> dict[str, torch.Tensor]:
    wide = torch.full((*sf.shape[:-1], sf.shape[-1] + 5), float("nan"))
    wide[..., 2:-3] = sf
    return {
        "row-major": sf,
        "mn-major": sf.mT.contiguous().mT,
        "wide": wide[..., 2:-3],
        "every second": sf.repeat_interleave(2, dim=-1)[..., ::2],
    }


# MN-major and TMA-aligned


@pytest.mark.parametrize(
    "size, elem_size, expected",
    [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8), (5, 2, 8), (9, 2, 16), (17, 1, 32), (3, 16, 3)],
)
def test_tma_aligned_size(size: int, elem_size: int, expected: int) -> None:
    assert get_tma_aligned_size(size, elem_size) == expected


def test_tma_aligned_size_refuses() -> None:
    with pytest.raises(ValueError, match="elem_size is 3, expected a divisor of 16"):
        get_tma_aligned_size(4, 3)
    with pytest.raises(ValueError, match="x is -1"):
        get_tma_aligned_size(-1, 4)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("mn", range(1, 10))
@pytest.mark.parametrize("num_k_blocks", [1, 2, 3, 9])
def test_every_layout_becomes_native(groups: int | None, mn: int, num_k_blocks: int) -> None:
    sf = make(groups, mn, num_k_blocks)
    for scales in variants(sf).values():
        native = get_mn_major_tma_aligned_tensor(scales)
        assert torch.equal(native, sf)
        assert get_mn_major_tma_aligned_tensor(native) is native
        assert get_col_major_tma_aligned_tensor(native) is native
        assert mn == 1 or native.stride(-2) == 1
        if num_k_blocks > 1:
            assert native.stride(-1) == -(-mn // 4) * 4
            assert groups in (None, 1) or native.stride(0) == num_k_blocks * native.stride(-1)


def test_strides_of_copies() -> None:
    assert get_mn_major_tma_aligned_tensor(torch.rand(5, 3)).stride() == (1, 8)
    assert get_mn_major_tma_aligned_tensor(torch.rand(2, 5, 3)).stride() == (24, 1, 8)
    assert get_mn_major_tma_aligned_tensor(torch.rand(1, 3)).stride() == (1, 4)


def test_native_scales_are_returned_as_they_are() -> None:
    buffer = torch.rand(1024)
    for shape, strides in (
        ((5, 3), (1, 8)),
        ((5, 3), (1, 12)),  # more padding than needed
        ((4, 3), (1, 4)),
        ((1, 3), (77, 4)),  # strides of single rows and blocks do not matter
        ((5, 1), (1, 1)),
        ((5, 1), (1, 3)),
        ((1, 1), (3, 5)),
        ((2, 5, 3), (24, 1, 8)),
        ((1, 5, 3), (7, 1, 8)),
        ((2, 5, 1), (8, 1, 3)),
        ((2, 1, 3), (12, 9, 4)),
    ):
        sf = buffer.as_strided(shape, strides)
        assert get_mn_major_tma_aligned_tensor(sf) is sf
        if len(shape) == 2:
            assert native_sfa(sf, shape[0], 128 * shape[1]) is sf
            assert native_sfa(sf, shape[0], 128 * shape[1] - 112) is sf


def test_scales_that_are_nearly_native_are_copied() -> None:
    buffer = torch.rand(1024)
    for shape, strides, offset in (
        ((5, 3), (1, 5), 0),  # columns not aligned
        ((5, 3), (1, 4), 0),  # columns overlap
        ((5, 3), (2, 16), 0),
        ((5, 3), (1, 8), 1),  # address not aligned
        ((5, 1), (1, 8), 2),
        ((5, 3), (0, 1), 0),
        ((2, 5, 3), (25, 1, 8), 0),  # groups that TMA cannot see as one tensor
        ((2, 5, 3), (32, 1, 8), 0),
        ((2, 5, 1), (5, 1, 1), 0),
    ):
        sf = buffer.as_strided(shape, strides, offset)
        copy = get_mn_major_tma_aligned_tensor(sf)
        assert copy is not sf and torch.equal(copy, sf)
        if len(shape) == 2:
            assert torch.equal(native_sfa(sf, shape[0], 128 * shape[1]), sf)


def test_empty_scales() -> None:
    for shape in ((0, 3), (3, 0), (0, 2, 3), (2, 0, 3)):
        sf = torch.empty(shape)
        assert get_mn_major_tma_aligned_tensor(sf).shape == sf.shape


def test_arguments_that_are_refused() -> None:
    with pytest.raises(TypeError, match="sf is a list, expected a torch.Tensor"):
        get_mn_major_tma_aligned_tensor([1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sf has dtype torch.float16, expected torch.float32"):
        get_mn_major_tma_aligned_tensor(torch.rand(3, 4).half())
    with pytest.raises(ValueError, match=r"sf has shape \(4,\), expected 2 or 3 dimensions"):
        get_mn_major_tma_aligned_tensor(torch.rand(4))


def test_c060_copies_of_the_call_path_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    layout._log_copy_once.cache_clear()
    with caplog.at_level(logging.DEBUG, logger="deep_gemm"):
        for _ in range(3):
            native_sfa(torch.rand(5, 3), 5, 384)
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert "per_token_cast_to_fp8" in caplog.text


# Required layouts


@pytest.mark.parametrize("groups", GROUPS)
def test_scales_per_row(groups: int | None) -> None:
    sf = make(groups, 130, 3)
    expected = get_mn_major_tma_aligned_tensor(sf)
    for recipe, is_sfa in (((1, 128, 128), True), ((1, 1, 128), False), ((1, 128), None)):
        out = transform_sf_into_required_layout(
            sf=sf, mn=130, k=300, recipe=recipe, num_groups=groups, is_sfa=is_sfa
        )
        assert torch.equal(out, sf) and out.stride() == expected.stride()
    assert transform_sf_into_required_layout(expected, 130, 300, (1, 128), groups) is expected


@pytest.mark.parametrize("groups", GROUPS)
def test_scales_per_block_stay_as_they_are(groups: int | None) -> None:
    sf = make(groups, 2, 3)
    assert transform_sf_into_required_layout(sf, 130, 300, (1, 128, 128), groups, False) is sf
    assert transform_sf_into_required_layout(sf, 130, 300, [128, 128], groups) is sf
    transposed = make(groups, 3, 2).mT
    assert transform_sf_into_required_layout(transposed, 130, 300, (128, 128), groups) is transposed
    with pytest.raises(ValueError, match="expected a contiguous tensor or the transposed view"):
        transform_sf_into_required_layout(
            make(groups, 2, 6)[..., ::2], 130, 300, (128, 128), groups
        )


@pytest.mark.parametrize(
    "error, words, changes",
    [
        (
            ValueError,
            r"sf has shape \(130, 3\), expected \(130, 4\) = \(ceil\(mn / 1\)",
            {"k": 400},
        ),
        (ValueError, r"expected \(2, 3\) = ", {"is_sfa": False}),
        (ValueError, "sf has shape .* expected 3 dimensions", {"num_groups": 1}),
        (ValueError, "is_sfa is None with recipe", {"is_sfa": None}),
        (ValueError, "is_sfa is True with recipe", {"recipe": (1, 128)}),
        (ValueError, "recipe is 128, expected", {"recipe": 128}),
        (NotImplementedError, "scales per 1 x 32, expected 1 x 128", {"recipe": (1, 1, 32)}),
        (NotImplementedError, "packed UE8M0", {"sf": torch.zeros(130, 1, dtype=torch.int32)}),
        (TypeError, "sf has dtype torch.bfloat16", {"sf": torch.zeros(130, 3).bfloat16()}),
    ],
)
def test_what_cannot_be_transformed(
    error: type[Exception], words: str, changes: dict[str, Any]
) -> None:
    arguments = {
        "sf": make(None, 130, 3),
        "mn": 130,
        "k": 300,
        "recipe": (1, 128, 128),
        "is_sfa": True,
    }
    with pytest.raises(error, match=words):
        transform_sf_into_required_layout(**arguments | changes)


# Packed UE8M0


def pack_one(sf: torch.Tensor) -> torch.Tensor:
    """Packed scales of [mn, k-blocks], element by element."""
    mn, num_k_blocks = sf.shape
    packed = torch.zeros(mn, -(-num_k_blocks // 4), dtype=torch.int64)
    for i in range(mn):
        for j in range(num_k_blocks):
            exponent = int(torch.frexp(sf[i, j])[1]) + 126
            packed[i, j // 4] |= exponent << (8 * (j % 4))
    return packed.to(torch.int32)  # wraps


def powers(*shape: int) -> torch.Tensor:
    return torch.exp2(torch.randint(-126, 128, shape).double()).float()


@pytest.mark.parametrize("mn", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("num_k_blocks", [1, 3, 4, 5])
def test_packed_scales(mn: int, num_k_blocks: int) -> None:
    sf = powers(2, mn, num_k_blocks)
    expected = torch.stack([pack_one(group) for group in sf])
    stride_k = -(-mn // 4) * 4
    for scales in (sf, sf.mT.contiguous().mT):
        packed = get_mn_major_tma_aligned_packed_ue8m0_tensor(scales)
        assert torch.equal(packed, expected)
        assert packed.stride() == (packed.shape[2] * stride_k, 1, stride_k)
        one = get_mn_major_tma_aligned_packed_ue8m0_tensor(scales[1])
        assert torch.equal(one, expected[1]) and one.stride() == (1, stride_k)


def test_c022_padding_rows_may_hold_anything() -> None:
    sf = powers(8, 4)
    clean = get_mn_major_tma_aligned_packed_ue8m0_tensor(sf)
    sf[5:] = torch.tensor([float("nan"), 0.3, -1.7, float("inf")])
    dirty = get_mn_major_tma_aligned_packed_ue8m0_tensor(sf, torch.tensor([5]))
    assert torch.equal(clean[:5], dirty[:5])


@pytest.mark.parametrize("mn", [1, 4, 6])
def test_packed_scales_of_groups_along_k(mn: int) -> None:
    ks = [256, 0, 128, 640]
    sf = powers(sum(ks) // 128, mn)
    sizes = torch.tensor(ks, dtype=torch.int32)
    packed = get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, sizes, ks, 128, 128)
    expected = [pack_one(group.t()).t() for group in sf.split([k // 128 for k in ks])]
    assert torch.equal(packed, torch.cat(expected))
    assert packed.stride() == (-(-mn // 4) * 4, 1)


def test_groups_along_k_that_are_refused() -> None:
    sf = powers(3, 4)
    with pytest.raises(ValueError, match="ks_cpu has 100, expected multiples of k_alignment = 128"):
        get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, None, [100], 128, 128)
    with pytest.raises(ValueError, match=r"sf has shape \(3, 4\), expected 2 rows"):
        get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, None, [256], 128, 128)
    with pytest.raises(NotImplementedError, match="use_psum_layout is True"):
        get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, None, [384], 128, 128, True)
    empty = get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf[:0], None, [], 128, 128)
    assert empty.shape == (0, 4)


# Alignment of groups


def test_alignment() -> None:
    getters = (
        layout.get_mk_alignment_for_contiguous_layout,
        layout.get_m_alignment_for_contiguous_layout,
        layout.get_k_alignment_for_contiguous_layout,
    )
    assert [getter() for getter in getters] == [128] * 3
    layout.set_mk_alignment_for_contiguous_layout(64)
    assert [getter() for getter in getters] == [64] * 3
    assert layout.get_theoretical_mk_alignment_for_contiguous_layout() == 128
    for expected_m in (1, 3, 4096):  # what the kernels like best is the same for all
        assert layout.get_theoretical_mk_alignment_for_contiguous_layout(expected_m) == 16
    for alignment in (1, 100, 2**40):  # prefix sums take any; the checks of a call know better
        layout.set_mk_alignment_for_contiguous_layout(alignment)
        assert [getter() for getter in getters] == [alignment] * 3
    for alignment in (0, -16):
        with pytest.raises(ValueError, match=f"alignment is {alignment}, expected 1 or more"):
            layout.set_mk_alignment_for_contiguous_layout(alignment)
    with pytest.raises(TypeError, match="alignment is 64.0, expected an int"):
        layout.set_mk_alignment_for_contiguous_layout(64.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="alignment is True, expected an int"):
        layout.set_mk_alignment_for_contiguous_layout(True)
    assert [getter() for getter in getters] == [2**40] * 3


def test_transposing_kernel_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    code = jit.build("transpose_scales", layout._TRANSPOSE)
    assert cubin.kernels(code)["transpose_scales"].frame_bytes == 0
