// Cast to FP8 with one scale per row and GRAN_K channels: q[row, k], sf[k / GRAN_K][row].
//
// A warp takes one block of channels of a few rows: GRAN_K / 16 lanes share a block, 16 channels each,
// and one block in each of NUM_CHUNKS groups of rows. So a warp's scales are neighbours in memory.
#pragma once

#include "cast_common.cuh"

using per_token_cast_args = CastArgs;  // sf_stride: from one block of channels to the next

template <class Config>
__host__ __device__ constexpr int per_token_cast_threads() {
    return Config::NUM_THREADS;
}

template <class Config>
DEVICE void per_token_cast_body(const per_token_cast_args& args) {
    constexpr int LANES = Config::GRAN_K / CHUNK;  // that share a block
    constexpr int STEP = 32 / LANES;               // rows that a warp loads at once
    const uint32_t lane_idx = threadIdx.x % 32;
    const uint32_t warp_idx = blockIdx.x * (Config::NUM_THREADS / 32) + threadIdx.x / 32;
    const uint32_t num_k_blocks = ceil_div(args.cols, Config::GRAN_K);
    const uint32_t k_block_idx = warp_idx % num_k_blocks;
    const uint32_t row = warp_idx / num_k_blocks * (Config::NUM_CHUNKS * STEP) + lane_idx / LANES;
    const uint32_t col = k_block_idx * Config::GRAN_K + lane_idx % LANES * CHUNK;

    Chunk<Config> chunks[Config::NUM_CHUNKS];
#pragma unroll
    for (int c = 0; c < Config::NUM_CHUNKS; ++c) chunks[c].load(args, row + c * STEP, col);
#pragma unroll
    for (int c = 0; c < Config::NUM_CHUNKS; ++c) {
        chunks[c].make_infinity_nan();
        const float sf = make_scale(args, max_over_lanes<1, LANES>(chunks[c].amax()));
        const float factor = __frcp_rn(sf);
        const uint32_t row_c = row + c * STEP;
        store_chunk(args, row_c, col, chunks[c], [&](int) { return factor; });
        if (lane_idx % LANES == 0 && row_c < args.rows) {
            args.sf[k_block_idx * args.sf_stride + row_c] = sf;
        }
    }
}
