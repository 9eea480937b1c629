"""The checks can fail: each defect planted in the grouped kernels turns the specification red."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grouped_defects import GROUPED_DEFECTS, GroupedDefect
from grouped_tools import check, make_case, with_config

from deep_gemm import arguments, jit
from deep_gemm.jit import codegen

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def own_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken kernel may leave its counter of units in any state."""
    monkeypatch.setattr(arguments, "unit_counters", arguments.UnitCounters())


@pytest.mark.parametrize("defect", GROUPED_DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_is_found(
    defect: GroupedDefect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = defect.make(device="cuda")
    check(case, defect.run, defect.zero_padding)

    monkeypatch.setattr(codegen, "KERNELS", defect.break_kernels(tmp_path / "kernels"))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_cubins", {})  # as before once the test is over
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(arguments, "unit_counters", arguments.UnitCounters())
    with pytest.raises(AssertionError) as caught:
        check(case, defect.run, defect.zero_padding)
    torch.cuda.synchronize()
    print(caught.value)


@pytest.mark.parametrize("more_rows, more_columns", [(16, 0), (0, 8)])
def test_a_store_beyond_the_output_is_found(
    more_rows: int, more_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard around D notices a tensor map of D that is too large.

    Rows of whole slabs go by that map; a group that ends inside of one goes another way, so only
    more columns show.
    """
    make_tensor_map = arguments.make_tensor_map
    case = make_case("psum", [128, 256], 200, 256, rows=384)

    def too_large(address: int, dtype: str, shape: tuple[int, int], *rest: Any) -> bytes:
        if dtype == "bfloat16":
            shape = shape[0] + more_rows, shape[1] + more_columns
        return make_tensor_map(address, dtype, shape, *rest)

    monkeypatch.setattr(arguments, "make_tensor_map", too_large)
    config = GROUPED_DEFECTS[0].config
    if more_rows:
        check(case, with_config(config))
    else:
        with pytest.raises(AssertionError, match="outside of D were written"):
            check(case, with_config(config))
