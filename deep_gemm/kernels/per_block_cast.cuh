// Cast to FP8 with one scale per GRAN_K x GRAN_K block: q[row, k], sf[row / GRAN_K][k / GRAN_K].
//
// A CTA keeps one block in registers: each thread has 16 channels of NUM_CHUNKS rows.
#pragma once

#include "cast_common.cuh"

using per_block_cast_args = CastArgs;  // sf_stride: from one row of blocks to the next

template <class Config>
__host__ __device__ constexpr int per_block_cast_threads() {
    return Config::NUM_THREADS;
}

template <class Config>
DEVICE void per_block_cast_body(const per_block_cast_args& args) {
    constexpr int LANES = Config::GRAN_K / CHUNK;      // threads that share a row
    constexpr int STEP = Config::NUM_THREADS / LANES;  // rows that the CTA loads at once
    static_assert(Config::NUM_CHUNKS * STEP == Config::GRAN_K, "the CTA has one block");
    constexpr int NUM_WARPS = Config::NUM_THREADS / 32;
    __shared__ float warp_amax[NUM_WARPS];

    const uint32_t num_k_blocks = ceil_div(args.cols, Config::GRAN_K);
    const uint32_t m_block_idx = blockIdx.x / num_k_blocks, k_block_idx = blockIdx.x % num_k_blocks;
    const uint32_t row = m_block_idx * Config::GRAN_K + threadIdx.x / LANES;
    const uint32_t col = k_block_idx * Config::GRAN_K + threadIdx.x % LANES * CHUNK;

    Chunk<Config> chunks[Config::NUM_CHUNKS];
#pragma unroll
    for (int c = 0; c < Config::NUM_CHUNKS; ++c) chunks[c].load(args, row + c * STEP, col);
    float amax = 0.0f;
#pragma unroll
    for (int c = 0; c < Config::NUM_CHUNKS; ++c) {
        chunks[c].make_infinity_nan();
        amax = fmaxf(amax, chunks[c].amax());
    }
    amax = max_over_lanes<1, 32>(amax);
    if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < NUM_WARPS; ++w) amax = fmaxf(amax, warp_amax[w]);

    const float sf = make_scale(args, amax);
    const float factor = __frcp_rn(sf);
#pragma unroll
    for (int c = 0; c < Config::NUM_CHUNKS; ++c) {
        store_chunk(args, row + c * STEP, col, chunks[c], [&](int) { return factor; });
    }
    if (threadIdx.x == 0) args.sf[m_block_idx * args.sf_stride + k_block_idx] = sf;
}
