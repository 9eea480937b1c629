"""The defects of the GPU tests: each is one edit, and its case is one that an intact kernel passes.

That they compile is for `test_kernels.py`, that they are found for `gpu/`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from grouped_defects import GROUPED_DEFECTS, GroupedDefect, late_ids
from grouped_tools import UNTOUCHED, ZERO, check

from deep_gemm.jit import codegen

defects = pytest.mark.parametrize("defect", GROUPED_DEFECTS, ids=lambda defect: defect.name)


def test_names_are_unique() -> None:
    assert len({defect.name for defect in GROUPED_DEFECTS}) == len(GROUPED_DEFECTS) >= 20


@defects
def test_a_defect_is_one_edit_of_one_file(defect: GroupedDefect, tmp_path: Path) -> None:
    root = defect.break_kernels(tmp_path / "kernels")
    changed = [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*.cuh"))
        if path.read_text() != (codegen.KERNELS / path.relative_to(root)).read_text()
    ]
    assert changed == [defect.file]


@defects
def test_its_case_is_passed_by_the_reference(defect: GroupedDefect) -> None:
    case = defect.make(device="cpu")
    check(case, defect.run, defect.zero_padding)
    assert defect.launches > 0 and case.is_computed.any()


def test_the_case_of_blocks_that_begin_without_a_group() -> None:
    states = late_ids("cpu").states.tolist()
    assert states[0] == ZERO and states[40] == 2
    assert states[128] == UNTOUCHED and states[192] == ZERO and states[255] == 1
