// Shared memory of one CTA, as a struct: sizes come from sizeof, reuse is visible, no offsets.
//
// Barrier table (tests/test_barriers.py recomputes the counts)
//   barrier           armed by                          completes after                       waited on by
//   full[stage]       TMA thread: 1 arrive.expect_tx    both arrivals + the bytes of A, B     every consumer
//                     scale warp: 1 arrive              and SFA (own and multicast ones)
//   empty[stage]      consumers: lane r of each warp    CLUSTER * NUM_CONSUMERS * 4 arrivals  TMA thread,
//                     arrives at CTA r of the cluster                                         scale warp
// A stage is full in phase p (0, 1, 0, ...) and empty again in phase p; the producers start with the
// opposite parity, so that their first wait on each stage returns at once.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"

constexpr int BLOCK_K = 128;    // channels per stage, and per scale
constexpr int WARPGROUP = 128;  // threads that issue one wgmma together
constexpr int WGMMA_M = 64;     // rows of one wgmma
constexpr int WGMMA_K = 32;     // channels of one FP8 wgmma
constexpr int WARP_M = 16;      // rows of D that one warp of a warpgroup holds

template <class Config>
struct SharedStorage {
    static constexpr int NUM_CONSUMER_WARPS = Config::NUM_CONSUMERS * 4;
    static constexpr int CLUSTER = Config::CLUSTER_M * Config::CLUSTER_N;
    // A weight scale covers 128 columns; a tile that may cross a multiple of 128 needs two.
    static constexpr int NUM_SFB = 128 % Config::BLOCK_N == 0 ? 1 : 2;

    // 1024 bytes are the period of the 128-byte swizzle.
    alignas(1024) uint8_t a[Config::NUM_STAGES][Config::BLOCK_M * BLOCK_K];
    alignas(1024) uint8_t b[Config::NUM_STAGES][Config::BLOCK_N * BLOCK_K];
    // Staging of D: a ring of slabs of 16 rows for each consumer warp, in bf16.
    alignas(1024) uint16_t d[NUM_CONSUMER_WARPS][Config::NUM_D_SLABS][WARP_M * Config::SLAB_N];
    alignas(128) float sfa[Config::NUM_STAGES][Config::BLOCK_M];
    float sfb[Config::NUM_STAGES][2];
    uint64_t full_barriers[Config::NUM_STAGES];
    uint64_t empty_barriers[Config::NUM_STAGES];

    // Called by one thread, before any other thread uses a barrier.
    DEVICE void init_barriers() {
        for (int stage = 0; stage < Config::NUM_STAGES; ++stage) {
            mbarrier_init(shared_address(&full_barriers[stage]), 2);
            mbarrier_init(shared_address(&empty_barriers[stage]), CLUSTER * NUM_CONSUMER_WARPS);
        }
        fence_mbarrier_init();
    }
};
