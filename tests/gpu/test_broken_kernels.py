"""The checks can fail: each defect that is planted in the kernel's source turns the oracle red."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dense_tools import DEFECTS, Defect, check, make_operands, with_config

from deep_gemm import arguments, jit
from deep_gemm.jit import codegen

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_is_found(defect: Defect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = make_operands(*defect.sizes, defect.fill)
    check(operands, with_config(defect.config))

    monkeypatch.setattr(codegen, "KERNELS", defect.break_kernels(tmp_path / "kernels"))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_cubins", {})  # as before once the test is over
    monkeypatch.setattr(jit, "_kernels", {})
    with pytest.raises(AssertionError) as caught:
        check(operands, with_config(defect.config))
    print(caught.value)


def test_a_store_beyond_the_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard around D notices a tensor map of D that is a few rows, or columns, too large."""
    make_tensor_map = arguments.make_tensor_map
    operands = make_operands(100, 200, 256)
    for more_rows, more_columns in ((4, 0), (0, 8)):

        def too_large(address: int, dtype: str, shape: tuple[int, int], *rest: Any) -> bytes:
            if dtype == "bfloat16":
                shape = shape[0] + more_rows, shape[1] + more_columns  # noqa: B023
            return make_tensor_map(address, dtype, shape, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(arguments, "make_tensor_map", too_large)
            with pytest.raises(AssertionError, match="outside of D were written"):
                check(operands, with_config(DEFECTS[0].config))
