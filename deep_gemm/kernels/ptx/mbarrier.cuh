// mbarrier: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
// Barriers are 8 bytes of shared memory, named by their 32-bit shared address.
#pragma once

#include "ptx/types.cuh"

DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes the initialised barriers visible to the other CTAs of the cluster and to TMA.
DEVICE void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives once and announces `bytes` that TMA will deliver before the phase can complete.
DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives on the barrier that has the same shared address in CTA `cta_rank` of the cluster.
DEVICE void mbarrier_arrive_cluster(uint32_t barrier, uint32_t cta_rank) {
    asm volatile(
        "{\n"
        "    .reg .b32 remote;\n"
        "    mapa.shared::cluster.u32 remote, %0, %1;\n"
        "    mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier),
        "r"(cta_rank)
        : "memory");
}

DEVICE bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        "    .reg .pred done;\n"
        "    mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "    selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// Returns once the phase of the given parity has completed.
DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {
    }
}
