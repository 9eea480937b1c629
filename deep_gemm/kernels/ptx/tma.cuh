// TMA: PTX ISA, "Data Movement and Conversion Instructions: Tensor copy" (cp.async.bulk.tensor).
// x runs along the contiguous dimension; parts of a box outside the tensor read as zero and are
// not written.
#pragma once

#include "ptx/types.cuh"

DEVICE void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box at (x, y) -> shared memory of this CTA; its bytes complete on `barrier`.
DEVICE void tma_load_2d(uint32_t dst, const TensorMap* map, uint32_t barrier, int32_t x,
                        int32_t y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
        "l"(map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

// What L2 does with lines that were loaded: as usual, or let go of them first. The constants are what
// createpolicy.fractional.L2::evict_{normal,first}.b64 makes of the fraction 1 (tests/gpu compares).
// NOTES: constants, since a policy from that instruction is in vector registers, from where it is
// moved before each load (measured: 1.1 to 1.5 times as slow).
constexpr uint64_t EVICT_NORMAL = 0x1000000000000000, EVICT_FIRST = 0x12F0000000000000;

DEVICE void tma_load_2d(uint32_t dst, const TensorMap* map, uint32_t barrier, int32_t x, int32_t y,
                        uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(policy)
        : "memory");
}

// Delivered to every CTA of `cta_mask` at the same shared address; the bytes complete on the barrier
// of each.
DEVICE void tma_load_2d_multicast(uint32_t dst, const TensorMap* map, uint32_t barrier, int32_t x,
                                  int32_t y, uint16_t cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(cta_mask)
        : "memory");
}

// Shared memory -> box at (x, y); part of the issuing thread's next bulk group.
DEVICE void tma_store_2d(const TensorMap* map, uint32_t src, int32_t x, int32_t y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(src), "r"(x), "r"(y)
        : "memory");
}

DEVICE void tma_store_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Returns once all but the newest `pending` groups of this thread have read their shared memory.
template <int pending>
DEVICE void tma_store_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Orders this thread's ordinary writes to shared memory before later TMA reads of it.
DEVICE void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
