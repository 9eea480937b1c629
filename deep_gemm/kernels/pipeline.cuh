// Where a thread stands in the ring of stages, and the two waits of the protocol.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"

template <int NUM_STAGES>
struct Pipeline {
    uint32_t full_barriers;   // shared address of the first full barrier
    uint32_t empty_barriers;  // shared address of the first empty barrier
    uint32_t stage_idx = 0;
    uint32_t phase = 0;

    DEVICE Pipeline(const uint64_t* full, const uint64_t* empty)
        : full_barriers(shared_address(full)), empty_barriers(shared_address(empty)) {
        pin(full_barriers);
        pin(empty_barriers);
    }

    DEVICE uint32_t full() const { return full_barriers + stage_idx * 8; }
    DEVICE uint32_t empty() const { return empty_barriers + stage_idx * 8; }

    DEVICE void wait_full() const { mbarrier_wait(full(), phase); }
    DEVICE void wait_empty() const { mbarrier_wait(empty(), phase ^ 1); }

    DEVICE void advance() {
        stage_idx = stage_idx + 1 == NUM_STAGES ? 0 : stage_idx + 1;
        phase ^= stage_idx == 0;
    }
};
