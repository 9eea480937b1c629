"""The comparator turns red for each kind of damage, and testing/'s helpers do what they say."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm import testing
from deep_gemm.testing.bench import kernel_durations, mean_duration


@pytest.fixture(scope="module")
def large() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(4096, 7168, dtype=torch.bfloat16)


@pytest.fixture
def small() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(300, 520).bfloat16()


def refuse(out: torch.Tensor, ref: torch.Tensor, *words: str, **limits: float) -> None:
    with pytest.raises(AssertionError) as caught:
        testing.compare(out, ref, **limits)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_passes_itself_and_its_float64_original() -> None:
    ref = torch.randn(130, 136, dtype=torch.float64)
    assert testing.compare(ref.bfloat16(), ref) == (0.0, 0.0, 0.0)
    assert testing.compare(torch.zeros(3, 5), torch.zeros(3, 5)) == (0.0, 0.0, 0.0)
    assert testing.compare(torch.empty(0, 8), torch.empty(0, 8)) == (0.0, 0.0, 0.0)


def test_passes_rounding_of_one_bfloat16_step(small: torch.Tensor) -> None:
    next_up = (small.view(torch.int16) + (torch.rand(small.shape) < 0.2)).view(torch.bfloat16)
    errors = testing.compare(next_up, small)
    assert 0 < errors.total <= errors.row < 1e-5
    assert errors.total <= errors.tile < 1e-5


def test_a_dead_tile_in_a_large_output_is_found(large: torch.Tensor) -> None:
    out = large.clone()
    out[1280:1408, 256:384] = 0
    assert testing.calc_diff(out, large) < 3e-4  # a limit of 1e-3 on the whole would miss it
    words = "128x128 tile at row 1280, column 256", "the worst element is at row", "0, expected"
    refuse(out, large, *words, tol=1e-3)


def test_a_wrong_row_is_found(large: torch.Tensor) -> None:
    ref = large[:1024, :1024]
    out = ref.clone()
    out[777] = out[778]
    refuse(out, ref, "in row 777", tol=1e-2)


def test_rows_off_by_one_are_found(small: torch.Tensor) -> None:
    refuse(small.roll(1, dims=0), small, "of the whole")


def test_a_swapped_scale_is_found() -> None:
    torch.manual_seed(2)
    a, b = torch.randn(256, 2048), torch.randn(256, 2048)
    sfa = torch.rand(256, 16) * 0.1 + 0.9

    def product(scales: torch.Tensor) -> torch.Tensor:
        return ((a.view(256, 16, 128) * scales[:, :, None]).flatten(1) @ b.t()).bfloat16()

    sfa[100, 3:5] = torch.tensor([0.9, 1.0])
    swapped = sfa.clone()
    swapped[100, 3:5] = torch.tensor([1.0, 0.9])
    refuse(product(swapped), product(sfa), "row 100")


def test_nan_never_passes(small: torch.Tensor) -> None:
    out = small.clone()
    out[299, 519] = float("nan")
    refuse(out, small, "1 NaN, expected 0", "row 299, column 519")
    refuse(small, out, "0 NaN, expected 1")
    assert testing.compare(out, out) == (0.0, 0.0, 0.0)
    assert not testing.calc_diff(out, small) <= 1.0


def test_infinities_need_place_and_sign(small: torch.Tensor) -> None:
    out, ref = small.clone(), small.clone()
    out[5, 6], ref[5, 6] = float("inf"), -float("inf")
    refuse(out, ref, "+inf", "row 5, column 6")
    assert testing.compare(out, out) == (0.0, 0.0, 0.0)
    large_but_finite = small.clone()
    large_but_finite[5, 6] = 3e38
    refuse(out, large_but_finite, "1 +inf, expected 0")


def test_values_beyond_the_range_of_the_output_are_rounded_first() -> None:
    ref = torch.tensor([[1e39, 1e-60, 1.0]], dtype=torch.float64)
    assert testing.compare(torch.tensor([[float("inf"), 0.0, 1.0]]).bfloat16(), ref).total == 0
    smallest = torch.tensor([[1, 0]], dtype=torch.int16).view(torch.bfloat16)
    assert testing.compare(smallest, torch.zeros(1, 2)).total == 0
    refuse(torch.tensor([[1e-30, 1.0]]).bfloat16()[:, :1], torch.zeros(1, 1), "of the whole")


def test_shapes_have_to_agree(small: torch.Tensor) -> None:
    refuse(small, small[:299], "shape (300, 520), expected (299, 520)")


def test_each_limit_can_be_set(small: torch.Tensor) -> None:
    out = small.clone()
    out[0, 0] += 3
    assert testing.compare(out, small, tol=1, tile_tol=1, row_tol=1).row > 1e-3
    refuse(out, small, "in row 0", "row 0, column 0", tol=1, row_tol=1e-3)
    refuse(out, small, "tile at row 0, column 0", tol=1, tile_tol=1e-5)


@given(row=st.integers(0, 299), column=st.integers(0, 519), three_d=st.booleans())
def test_one_wrong_element_anywhere_is_found_where_it_is(
    row: int, column: int, three_d: bool
) -> None:
    ref = torch.ones(300, 520)
    out = ref.clone()
    out[row, column] = 2
    shape = (3, 100, 520) if three_d else (300, 520)
    where = f"row {row}, column {column}: 2, expected 1"
    refuse(out.view(shape), ref.view(shape), where, tol=1e-4)


def test_calc_diff() -> None:
    x = torch.randn(100)
    assert testing.calc_diff(torch.zeros(3), torch.zeros(3)) == 0
    assert testing.calc_diff(x, x) == 0
    assert testing.calc_diff(x, -x) == 2
    with pytest.raises(ValueError, match="y has shape"):
        testing.calc_diff(x, x[:1])
    assert testing.calc_diff(x, 2 * x) == pytest.approx(0.2)


def test_count_bytes() -> None:
    x = torch.empty(3, 5, dtype=torch.bfloat16)
    assert testing.count_bytes(x, (x, [x, None]), None) == 90


def test_assert_bitwise_equal() -> None:
    x = torch.tensor([[1.0, 0.0], [float("nan"), 2.0]])
    testing.assert_bitwise_equal(x, x.clone())
    testing.assert_bitwise_equal(x.t(), x.t().contiguous())
    with pytest.raises(AssertionError, match=r"d: 1 of 4 .* at \(0, 1\): 0.0 against -0.0"):
        y = torch.tensor([[1.0, -0.0], [float("nan"), 2.0]])
        testing.assert_bitwise_equal(x, y, label="d")
    with pytest.raises(AssertionError, match="float64"):
        testing.assert_bitwise_equal(x, x.double())
    testing.assert_bitwise_equal(torch.empty(0, 3), torch.empty(0, 3))


def test_test_filter_and_ignore_env(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert testing.test_filter(lambda: True)(lambda x: x + 1)(1) == 2
    assert testing.test_filter(lambda: False)(lambda x: x + 1)(1) is None
    assert "left out" in capsys.readouterr().out

    monkeypatch.setenv("DG_SOME_SWITCH", "1")

    def read() -> str | None:
        return os.environ.get("DG_SOME_SWITCH")

    assert testing.ignore_env("DG_SOME_SWITCH", lambda: True)(read)() is None
    assert testing.ignore_env("DG_SOME_SWITCH", lambda: False)(read)() == "1"
    assert read() == "1"


def test_get_arch_major_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert testing.get_arch_major() == 0


def event(name: str, microseconds: float, device: str = "CUDA", annotation: bool = False) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=annotation,
        time_range=SimpleNamespace(elapsed_us=lambda: microseconds),
    )


def test_bench_kineto_reads_event_objects() -> None:
    events = [
        event("void fp8_gemm_1d2d", 10.0),
        event("void fp8_gemm_1d2d", 30.0),
        event("void fp8_gemm_small", 80.0),
        event("cudaLaunchKernel", 5.0, device="CPU"),
        event("a label of fp8_gemm", 5.0, annotation=True),
    ]
    durations = kernel_durations(events)
    assert set(durations) == {"void fp8_gemm_1d2d", "void fp8_gemm_small"}
    assert mean_duration(durations, "1d2d") == pytest.approx(20e-6)
    assert mean_duration(durations, "fp8_gemm", several=True) == pytest.approx(40e-6)
    with pytest.raises(RuntimeError, match="'fp8_gemm' matches 2 kernels"):
        mean_duration(durations, "fp8_gemm")
    with pytest.raises(RuntimeError, match="no kernel named 'wgrad' ran; these did"):
        mean_duration(durations, "wgrad")
