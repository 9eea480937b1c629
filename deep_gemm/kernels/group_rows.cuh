// The routing step of MoE: a row of the grouped buffer for each slot, a choice of a token.
//
// Rows of an expert are in the order of their slots. So a slot's row is where its expert begins,
// plus how many slots before it have the same expert. A CTA gives rows to a range of slots:
//   1. It counts the slots of each expert, those before its range apart.
//   2. Sums over experts tell where each one begins, hence where the range's own slots go.
//   3. A warp walks the range, 32 slots at a time; the others mark rows without a slot as padding.
// Every CTA reads all experts in step 1. They are few, and it saves a second launch, a workspace,
// and waiting for others. Counters are only added to until all is counted, so no order shows.
#pragma once

#include "ptx/warp.cuh"

struct group_rows_args {
    const void* experts;   // [num_slots], of ID_BYTES bytes; outside of [0, num_experts): no row
    int32_t* row_of_slot;  // [num_slots], -1: none
    int32_t* slot_of_row;  // [num_rows], -1: padding
    // One of these, the others are null.
    int32_t* group_of_row;  // [num_rows], -1: padding
    int32_t* group_ends;    // [num_experts], the row that each group ends before
    int32_t* group_counts;  // [num_experts], rows of each group; they begin at multiples of m_max
    uint32_t num_slots;
    uint32_t slots_per_cta;  // a multiple of 32
    uint32_t num_experts;    // at most MAX_EXPERTS
    uint32_t num_rows;       // slots beyond have no row
    uint32_t alignment;      // groups begin at multiples of it
    uint32_t m_max;          // group_counts: rows of a group, slots beyond have none
};

template <class Config>
__host__ __device__ constexpr int group_rows_threads() {
    return Config::NUM_THREADS;
}

template <class Config>
struct GroupRows {
    static constexpr uint32_t NUM_THREADS = Config::NUM_THREADS, NUM_WARPS = NUM_THREADS / 32;
    static_assert(NUM_THREADS % 32 == 0 && NUM_WARPS > 1, "one warp walks, the others pad");
    static_assert(Config::ID_BYTES == 4 || Config::ID_BYTES == 8, "int32 or int64");

    union Count {
        uint32_t slots;  // until `place_groups`
        uint32_t row;    // from then on
    };
    struct Storage {
        Count before[Config::MAX_EXPERTS];  // slots before the range of this CTA; its next row
        Count rest[Config::MAX_EXPERTS];    // all other slots; the row that the group ends before
        uint32_t rows_of_warp[NUM_WARPS];
    };

    const group_rows_args& args;
    Storage& smem;
    uint32_t slot_begin, slot_end;  // the range of this CTA

    DEVICE void run() {
        for (uint32_t expert = threadIdx.x; expert < args.num_experts; expert += NUM_THREADS) {
            smem.before[expert].slots = smem.rest[expert].slots = 0;
        }
        __syncthreads();
        count_slots();
        __syncthreads();
        place_groups();
        __syncthreads();
        if (threadIdx.x < 32) {
            give_rows();
        } else {
            mark_padding();
        }
    }

    DEVICE void count_slots() {
        constexpr uint32_t BATCH = 8;  // loads in flight
        for (uint32_t begin = 0; begin < args.num_slots; begin += BATCH * NUM_THREADS) {
            int32_t experts[BATCH];
#pragma unroll
            for (uint32_t i = 0; i < BATCH; ++i) {
                experts[i] = load_expert(begin + i * NUM_THREADS + threadIdx.x);
            }
#pragma unroll
            for (uint32_t i = 0; i < BATCH; ++i) {
                if (experts[i] < 0) continue;
                const bool is_before = begin + i * NUM_THREADS + threadIdx.x < slot_begin;
                Count& count = (is_before ? smem.before : smem.rest)[experts[i]];
                atomicAdd(&count.slots, 1);
            }
        }
    }

    // A thread takes consecutive experts. Ends are cut off where rows end.
    DEVICE void place_groups() {
        const uint32_t num_each = (args.num_experts + NUM_THREADS - 1) / NUM_THREADS;
        const uint32_t first = min(threadIdx.x * num_each, args.num_experts);
        const uint32_t last = min(first + num_each, args.num_experts);
        uint32_t rows = 0;
        for (uint32_t expert = first; expert < last; ++expert) rows += aligned(count_of(expert));

        const uint32_t warp_idx = threadIdx.x / 32;
        const uint32_t rows_until = inclusive_sum(rows);
        if (threadIdx.x % 32 == 31) smem.rows_of_warp[warp_idx] = rows_until;
        __syncthreads();
        uint32_t next_group = rows_until - rows;
        for (uint32_t i = 0; i < warp_idx; ++i) next_group += smem.rows_of_warp[i];

        for (uint32_t expert = first; expert < last; ++expert) {
            const bool has_own_rows = args.group_counts != nullptr;
            const uint32_t begin = has_own_rows ? expert * args.m_max : next_group;
            const uint32_t limit = has_own_rows ? begin + args.m_max : args.num_rows;
            const uint32_t count = count_of(expert), end = min(begin + count, limit);
            smem.before[expert].row = begin + smem.before[expert].slots;
            smem.rest[expert].row = end;
            next_group += aligned(count);
            if (blockIdx.x != 0) continue;
            if (args.group_ends != nullptr) args.group_ends[expert] = end;
            if (has_own_rows) args.group_counts[expert] = end - begin;
        }
    }

    // By one warp.
    DEVICE void give_rows() {
        const uint32_t lane_idx = threadIdx.x;
        int32_t next_expert = load_expert(slot_begin + lane_idx);
        for (uint32_t begin = slot_begin; begin < slot_end; begin += 32) {
            const uint32_t slot = begin + lane_idx;
            const int32_t expert = next_expert;
            next_expert = load_expert(slot + 32);  // so that nothing waits for memory
            const uint32_t same = __match_any_sync(0xFFFFFFFF, expert);
            const uint32_t same_before = __popc(same & ((1u << lane_idx) - 1));
            const uint32_t first_row = expert >= 0 ? smem.before[expert].row : 0;
            const uint32_t row = first_row + same_before;
            const bool has_row = expert >= 0 && row < smem.rest[expert].row;
            __syncwarp();
            if (expert >= 0 && same_before == 0) {
                smem.before[expert].row = first_row + __popc(same);
            }
            __syncwarp();
            if (slot < slot_end) args.row_of_slot[slot] = has_row ? row : -1;
            if (has_row) {  // hence slot < slot_end
                args.slot_of_row[row] = slot;
                if (args.group_of_row != nullptr) args.group_of_row[row] = expert;
            }
        }
    }

    // By the other warps of all CTAs: each row that `give_rows` leaves out, once.
    DEVICE void mark_padding() const {
        constexpr uint32_t WORKERS = NUM_THREADS - 32;
        const uint32_t first = blockIdx.x * WORKERS + threadIdx.x - 32;
        for (uint32_t row = first; row < args.num_rows; row += gridDim.x * WORKERS) {
            if (!is_padding(row)) continue;
            args.slot_of_row[row] = -1;
            if (args.group_of_row != nullptr) args.group_of_row[row] = -1;
        }
    }

    DEVICE bool is_padding(uint32_t row) const {
        if (args.group_counts != nullptr) return row >= smem.rest[row / args.m_max].row;
        uint32_t low = 0, high = args.num_experts;  // the first group that ends behind the row
        while (low < high) {
            const uint32_t middle = (low + high) / 2;
            if (smem.rest[middle].row > row) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return low == args.num_experts || (low > 0 && row < aligned(smem.rest[low - 1].row));
    }

    DEVICE uint32_t count_of(uint32_t expert) const {
        return smem.before[expert].slots + smem.rest[expert].slots;
    }

    DEVICE uint32_t aligned(uint32_t row) const {
        return (row + (args.alignment - 1)) / args.alignment * args.alignment;
    }

    // -1: none.
    DEVICE int32_t load_expert(uint32_t slot) const {
        if (slot >= args.num_slots) return -1;
        if constexpr (Config::ID_BYTES == 8) {
            const uint64_t id = __ldg(static_cast<const uint64_t*>(args.experts) + slot);
            return id < args.num_experts ? static_cast<int32_t>(id) : -1;
        } else {
            const uint32_t id = __ldg(static_cast<const uint32_t*>(args.experts) + slot);
            return id < args.num_experts ? static_cast<int32_t>(id) : -1;
        }
    }
};

template <class Config>
DEVICE void group_rows_body(const group_rows_args& args) {
    __shared__ typename GroupRows<Config>::Storage smem;
    const uint32_t slot_begin = min(blockIdx.x * args.slots_per_cta, args.num_slots);
    const uint32_t slot_end = min(slot_begin + args.slots_per_cta, args.num_slots);
    GroupRows<Config>{args, smem, slot_begin, slot_end}.run();
}
