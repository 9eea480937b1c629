"""Timing and comparison helpers, the names that clients' tests import, and our own comparator."""

from deep_gemm.testing.bench import bench, bench_kineto
from deep_gemm.testing.compare import Errors, compare
from deep_gemm.testing.numeric import assert_bitwise_equal, calc_diff, count_bytes
from deep_gemm.testing.utils import get_arch_major, ignore_env, test_filter

__all__ = [
    "Errors",
    "assert_bitwise_equal",
    "bench",
    "bench_kineto",
    "calc_diff",
    "compare",
    "count_bytes",
    "get_arch_major",
    "ignore_env",
    "test_filter",
]
