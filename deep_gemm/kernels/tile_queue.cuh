// The tiles of a grouped kernel, as its scheduler warp hands them to the other roles of its CTA: a
// ring of slots in shared memory, with full and empty barriers as the ring of stages has them.
#pragma once

#include "arguments.cuh"
#include "grouped_scheduler.cuh"
#include "pipeline.cuh"
#include "shared_storage.cuh"

// How many k-blocks before its loads run out the TMA warp asks for the next tile: enough to find it in
// the meantime. Not more, so that tiles are drawn late, by whoever has room, and run in their order.
constexpr uint32_t LEAD = 4;

// Scheduler warp: fills the queue, one tile at a time as they are wanted; where tiles have so few
// k-blocks that one is no lead, some tiles ahead.
template <class Config>
DEVICE void schedule_tiles(const fp8_gemm_1d2d_args& args, TileQueue<Config>& queue) {
    const uint32_t num_k_blocks = (args.shape_k + BLOCK_K - 1) / BLOCK_K;
    GroupedScheduler<Config> scheduler(args.rows, args.shape_n, num_k_blocks, args.raster_m,
                                       blockIdx.x, gridDim.x);
    Pipeline<NUM_TILE_SLOTS> slots(queue.full_barriers, queue.empty_barriers);
    Pipeline<NUM_TILE_SLOTS> wanted(queue.wanted_barriers, queue.wanted_barriers);
    uint32_t tiles_ahead = num_k_blocks > LEAD ? 1 : 1 + (LEAD + num_k_blocks - 1) / num_k_blocks;
    bool is_tile;
    do {
        slots.wait_empty();
        if (tiles_ahead > 0) {
            --tiles_ahead;
        } else {
            wanted.wait_full();
            wanted.advance();
        }
        TileSlot& slot = queue.slots[slots.stage_idx];
        Tile tile;
        is_tile = scheduler.next(tile, slot.valid, slot.stored);
        if (is_first_lane()) {
            slot.tile = tile;
            slot.is_tile = is_tile;
            mbarrier_arrive(slots.full());
        }
        __syncwarp();
        slots.advance();
    } while (is_tile);
}

// The other end of the queue, for one warp. A slot is held until the next tile is asked for.
template <class Config>
struct QueuedTiles {
    const TileQueue<Config>& queue;
    Pipeline<NUM_TILE_SLOTS> slots;
    uint32_t slot_idx = NUM_TILE_SLOTS;  // that is held; at first none

    DEVICE explicit QueuedTiles(const TileQueue<Config>& queue)
        : queue(queue), slots(queue.full_barriers, queue.empty_barriers) {}

    DEVICE const TileSlot& slot() const { return queue.slots[slot_idx]; }

    // TMA warp, once for each tile: it soon needs another.
    DEVICE void want_next() const {
        if (threadIdx.x % 32 == 0)
            mbarrier_arrive(shared_address(&queue.wanted_barriers[slot_idx]));
    }

    // Moves on to the next tile; false when there is none.
    DEVICE bool next(Tile& tile) {
        if (slot_idx < NUM_TILE_SLOTS) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(slots.empty_barriers + slot_idx * 8);
        }
        slots.wait_full();
        slot_idx = slots.stage_idx;
        slots.advance();
        const Tile& queued = slot().tile;
        tile.m = uniform(queued.m), tile.n = uniform(queued.n);
        tile.rows = uniform(queued.rows), tile.group_idx = uniform(queued.group_idx);
        tile.sf_row = uniform(queued.sf_row), tile.sf_column = uniform(queued.sf_column);
        tile.k_block_begin = uniform(queued.k_block_begin);
        tile.k_block_end = uniform(queued.k_block_end);
        // NOTES: a vote, since the compiler trusts that its result is the same in all lanes. Else it
        // keeps the loops' state in vector registers, and moves descriptors out of them between the
        // wgmmas of the main loop (measured: up to 1.6 times as slow).
        return vote(slot().is_tile) != 0;
    }
};
