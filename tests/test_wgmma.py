"""The generated tensor-core wrappers are what their generator writes, and enough for every plan."""

import importlib.util
import re

import pytest
from dense_tools import CONFIGS

from deep_gemm.jit.codegen import KERNELS


@pytest.fixture(scope="module")
def make_wgmma():
    spec = importlib.util.spec_from_file_location("make_wgmma", KERNELS / "ptx/make_wgmma.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_file_is_what_the_generator_writes(make_wgmma):
    assert (KERNELS / "ptx/wgmma.cuh").read_text() == make_wgmma.text(), (
        "run python deep_gemm/kernels/ptx/make_wgmma.py"
    )


@pytest.mark.parametrize("n", [16, 96, 192])
def test_a_wrapper_numbers_its_operands_without_gaps(make_wgmma, n):
    """%0 to %(n/2 - 1) are the accumulators, then two descriptors and the accumulate flag."""
    text = make_wgmma.wrapper(n)
    numbers = {int(number) for number in re.findall(r"%(\d+)", text)}
    assert numbers == set(range(n // 2 + 3))
    assert text.count('"+f"') == n // 2
    assert f"m64n{n}k32" in text and f"float (&d)[{n // 2}]" in text


def test_there_is_one_for_every_width_of_a_plan(make_wgmma):
    assert {config.block_n for config in CONFIGS} <= set(make_wgmma.WIDTHS)
