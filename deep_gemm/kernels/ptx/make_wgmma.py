"""Writes wgmma.cuh, the tensor-core instruction for every width that a kernel may use.

Run it from anywhere; `tests/test_wgmma.py` checks that the committed file is what it writes.
"""

from pathlib import Path

WIDTHS = range(16, 193, 16)

HEADER = """\
// Written by make_wgmma.py; edit that file instead.
// clang-format off
// wgmma: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
#pragma once

#include "ptx/types.cuh"

// Orders register accesses of this warpgroup before its next wgmma.
DEVICE void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

DEVICE void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Returns once all but the newest `pending` groups of this warpgroup have completed; `pending` is a
// constant at every call, so only one of the branches is compiled.
DEVICE void wgmma_wait_group(int pending) {
    if (pending == 0) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (pending == 1) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (pending == 2) asm volatile("wgmma.wait_group.sync.aligned 2;" ::: "memory");
    if (pending == 3) asm volatile("wgmma.wait_group.sync.aligned 3;" ::: "memory");
}

// Keeps the compiler from moving reads or writes of wgmma registers across this point.
template <int count>
DEVICE void fence_registers(float (&d)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Shared-memory matrix descriptor of a K-major tile whose rows are 128 bytes with 128-byte swizzle:
// bits 0-13 address / 16, 16-29 leading offset (unused here: 1), 32-45 stride between groups of
// eight rows / 16, 62-63 swizzle mode (1: 128 bytes). The low word is a shared address in units of
// 16 bytes, so adding 2 to it moves on by 32 bytes along K, and shared memory is too small to
// overflow it.
DEVICE uint32_t wgmma_descriptor_low(uint32_t address) {
    return 1 << 16 | (address & 0x3FFFF) >> 4;
}

DEVICE uint64_t wgmma_descriptor(uint32_t low) {
    return uint64_t{1 << 30 | 1024 / 16} << 32 | low;
}

// d[64 x N] = A[64 x 32] * B[N x 32]^T (+ d if accumulate), e4m3 operands in shared memory, float32
// d in registers: thread t of the warpgroup holds, for each 8 columns j, d[4j + 2h + c] at row
// 16 * (t / 32) + t % 32 / 4 + 8 * h and column 8 * j + t % 4 * 2 + c.
template <int N>
struct Wgmma;
"""

TEMPLATE = """
template <>
struct Wgmma<{n}> {{
    static DEVICE void mma(float (&d)[{count}], uint64_t a, uint64_t b, bool accumulate) {{
        asm volatile(
            "{{\\n"
            ".reg .pred p;\\n"
            "setp.ne.b32 p, %{flag}, 0;\\n"
            "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3\\n"
            "{{{registers}}},\\n"
            "%{count}, %{b}, p, 1, 1;\\n"
            "}}\\n"
            : {operands}
            : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
    }}
}};
"""


def wrapper(n: int) -> str:
    count = n // 2
    return TEMPLATE.format(
        n=n,
        count=count,
        b=count + 1,
        flag=count + 2,
        registers=", ".join(f"%{i}" for i in range(count)),
        operands=", ".join(f'"+f"(d[{i}])' for i in range(count)),
    )


def text() -> str:
    body = "".join(wrapper(n) for n in WIDTHS)
    return HEADER + body


if __name__ == "__main__":
    Path(__file__).with_name("wgmma.cuh").write_text(text())
