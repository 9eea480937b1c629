"""Small GEMMs over all kernels, for compute-sanitizer; `test_sanitizer.py` runs this under it.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py

Inputs are made, and results checked, on the CPU: what the sanitizer watches is ours alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from dense_tools import CONFIGS, limits, make_operands  # noqa: E402

import deep_gemm  # noqa: E402
from deep_gemm.gemm import run_dense  # noqa: E402
from deep_gemm.testing import compare  # noqa: E402

# One tile and its tails; clusters that hang over, more k-blocks than stages.
SIZES = [(3, 24, 16), (200, 392, 144), (65, 136, 1680)]


def main() -> None:
    count = 0
    for m, n, k in SIZES:
        on_cpu = make_operands(m, n, k, device="cpu")
        expected = on_cpu.oracle()
        # the storage, not the view: its gaps come along, so that nothing is uninitialised
        a, b = (tuple(_to_gpu(tensor) for tensor in pair) for pair in on_cpu)
        for config in CONFIGS:
            d = torch.zeros(m, n, dtype=torch.bfloat16).cuda()
            run_dense(a, b, d, config)
            compare(d.cpu(), expected, **limits(m, n), name=f"{config}, {(m, n, k)}")
            count += 1
        d = torch.zeros(m, n, dtype=torch.bfloat16).cuda()
        deep_gemm.fp8_gemm_nt((a[0], on_cpu.a[1].contiguous().cuda()), b, d)
        compare(d.cpu(), expected, **limits(m, n), name="row-major scales")
    x = torch.randn(65, 272).cuda()
    deep_gemm.per_token_cast_to_fp8(x)
    deep_gemm.per_block_cast_to_fp8(x)
    torch.cuda.synchronize()
    print(f"{count} GEMMs are right")


def _to_gpu(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).cuda()
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


if __name__ == "__main__":
    main()
