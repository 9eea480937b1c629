"""Small grouped GEMMs over all kernels, for compute-sanitizer; `test_sanitizer.py` runs this.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_grouped.py

As in `sanitize.py`, inputs are made, and results checked, on the CPU. Every kernel also runs with
layouts that hold nonsense: then the sanitizer alone has to be content.
"""

from __future__ import annotations

import copy

import sanitize  # first: it makes the repository's modules known
import torch
from grouped_tools import (
    GROUPED_CONFIGS,
    POISON,
    GroupedCase,
    GroupedGemm,
    make_case,
    planned,
    with_config,
)

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)

# More k-blocks than two stages, tails of all sizes, groups without rows and with one.
CASES = [
    ("ids", 16, [17, 0, 65, 1], 200, 528),
    ("psum", 8, [17, 0, 65, 1], 136, 272),
    ("masked", 128, [67, 0, 1, 66], 200, 528),
]
NONSENSE = {
    "ids": [2**30, -2, 5, 4, 3, INT_MAX, INT_MIN],  # by turns
    "psum": [INT_MAX, 3, INT_MIN, 50],
    "masked": [670, -1, INT_MAX, INT_MIN],
}


def on_gpu(case: GroupedCase) -> GroupedCase:
    """The same case with its tensors on the GPU: whole storages, so that gaps come along."""
    moved = copy.copy(case)
    moved.a, moved.b = (tuple(map(sanitize._to_gpu, pair)) for pair in (case.a, case.b))
    moved.layout, moved.device = case.layout.cuda(), "cuda"
    return moved


def run(case: GroupedCase, gemm: GroupedGemm, ensure_zero_padding: bool = True) -> torch.Tensor:
    d = torch.full((case.num_rows, case.n), POISON, dtype=torch.int16).cuda().view(torch.bfloat16)
    gemm(case, case.shaped(d), ensure_zero_padding)
    return d.cpu()


def main() -> None:
    count = 0
    for kind, alignment, sizes, n, k in CASES:
        case = make_case(kind, sizes, n, k, alignment=alignment, device="cpu")
        case.oracle()
        moved = on_gpu(case)
        for gemm in (planned, *(with_config(config) for config in GROUPED_CONFIGS)):
            case.check_rows(run(moved, gemm))
            count += 1
        if kind != "masked":
            case.check_rows(run(moved, planned, False), ensure_zero_padding=False)
        native, row_major = moved.a, case.a[1].contiguous().cuda()
        moved.a = native[0], row_major
        case.check_rows(run(moved, planned))
        moved.a = native
        values = NONSENSE[kind] * len(case.layout)
        moved.layout = torch.tensor(values[: len(case.layout)], dtype=torch.int32).cuda()
        for config in GROUPED_CONFIGS:
            run(moved, with_config(config))
    torch.cuda.synchronize()
    print(f"{count} grouped GEMMs are right")


if __name__ == "__main__":
    main()
