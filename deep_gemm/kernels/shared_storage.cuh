// Shared memory of one CTA, as a struct: sizes come from sizeof, reuse is visible, no offsets.
//
// Barrier table (tests/test_barriers.py recomputes the counts)
//   barrier           armed by                          completes after                       waited on by
//   full[stage]       TMA thread: 1 arrive.expect_tx    both arrivals + the bytes of A, B     every consumer
//                     scale warp: 1 arrive              and SFA (own and multicast ones)
//   empty[stage]      consumers: lane r of each warp    CLUSTER * NUM_CONSUMERS * 4 arrivals  TMA thread,
//                     arrives at CTA r of the cluster                                         scale warp
//   queue.full[slot]  scheduler warp: 1 arrive          that arrival                          every other role
//   queue.empty[slot] each warp of every other role:    NUM_CONSUMER_WARPS + 2 arrivals       scheduler warp
//                     1 arrive
//   queue.wanted[slot] TMA warp: 1 arrive               that arrival                          scheduler warp
// The queue is that of grouped kernels only. A stage, or slot, is full in phase p (0, 1, 0, ...) and
// empty again in phase p; who fills it starts with the opposite parity, so that the first wait on
// each returns at once.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "scheduler.cuh"

constexpr int BLOCK_K = 128;       // channels per stage, and per scale
constexpr int WARPGROUP = 128;     // threads that issue one wgmma together
constexpr int WGMMA_M = 64;        // rows of one wgmma
constexpr int WGMMA_K = 32;        // channels of one FP8 wgmma
constexpr int WARP_M = 16;         // rows of D that one warp of a warpgroup holds
constexpr int NUM_TILE_SLOTS = 8;  // of the queue of a grouped kernel

// A tile on its way from the scheduler warp to the other roles, with a bit for each of its rows.
struct TileSlot {
    Tile tile;
    uint32_t is_tile;    // 0: there are no more
    uint32_t valid[8];   // rows to compute; the others of the tile become zeros
    uint32_t stored[8];  // rows to write
};

template <class Config, bool is_grouped = Config::IS_GROUPED>
struct TileQueue {
    TileSlot slots[NUM_TILE_SLOTS];
    alignas(8) uint64_t full_barriers[NUM_TILE_SLOTS];
    uint64_t empty_barriers[NUM_TILE_SLOTS];
    uint64_t wanted_barriers[NUM_TILE_SLOTS];

    DEVICE void init_barriers() {
        for (int slot = 0; slot < NUM_TILE_SLOTS; ++slot) {
            mbarrier_init(shared_address(&full_barriers[slot]), 1);
            mbarrier_init(shared_address(&empty_barriers[slot]), Config::NUM_CONSUMERS * 4 + 2);
            mbarrier_init(shared_address(&wanted_barriers[slot]), 1);
        }
    }
};

template <class Config>
struct TileQueue<Config, false> {  // tiles of a dense kernel need no queue
    DEVICE void init_barriers() {}
};

template <class Config>
struct SharedStorage : TileQueue<Config> {
    static constexpr int NUM_CONSUMER_WARPS = Config::NUM_CONSUMERS * 4;
    static constexpr int CLUSTER = Config::CLUSTER_M * Config::CLUSTER_N;
    // TMA loads scales of A from multiples of four rows on; a group may begin between them.
    static constexpr int SFA_ROWS = Config::BLOCK_M + (Config::IS_GROUPED ? 4 : 0);
    static_assert(SFA_ROWS <= 256, "TMA's boxes are no longer");
    static constexpr int SFA_STRIDE = (SFA_ROWS + 31) / 32 * 32;  // TMA writes to 128-byte lines
    // A weight scale covers 128 columns; a tile that may cross a multiple of 128 needs two.
    static constexpr int NUM_SFB = 128 % Config::BLOCK_N == 0 ? 1 : 2;

    // 1024 bytes are the period of the 128-byte swizzle.
    alignas(1024) uint8_t a[Config::NUM_STAGES][Config::BLOCK_M * BLOCK_K];
    alignas(1024) uint8_t b[Config::NUM_STAGES][Config::BLOCK_N * BLOCK_K];
    // Staging of D: a ring of slabs of 16 rows for each consumer warp, in bf16.
    alignas(1024) uint16_t d[NUM_CONSUMER_WARPS][Config::NUM_D_SLABS][WARP_M * Config::SLAB_N];
    alignas(128) float sfa[Config::NUM_STAGES][SFA_STRIDE];
    float sfb[Config::NUM_STAGES][2];
    uint64_t full_barriers[Config::NUM_STAGES];
    uint64_t empty_barriers[Config::NUM_STAGES];

    // Called by one thread, before any other thread uses a barrier.
    DEVICE void init_barriers() {
        for (int stage = 0; stage < Config::NUM_STAGES; ++stage) {
            mbarrier_init(shared_address(&full_barriers[stage]), 2);
            mbarrier_init(shared_address(&empty_barriers[stage]), CLUSTER * NUM_CONSUMER_WARPS);
        }
        TileQueue<Config>::init_barriers();
        fence_mbarrier_init();
    }
};
