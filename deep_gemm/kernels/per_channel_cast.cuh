// Cast to FP8 with one scale per column and GRAN_K rows: q[k, col], sf[k / GRAN_K][col].
//
// A CTA keeps GRAN_K rows of 128 columns in registers: each thread has 16 columns of NUM_CHUNKS rows.
#pragma once

#include "cast_common.cuh"

using per_channel_cast_args = CastArgs;  // sf_stride: from one block of rows to the next

template <class Config>
__host__ __device__ constexpr int per_channel_cast_threads() {
    return Config::NUM_THREADS;
}

template <class Config>
DEVICE void per_channel_cast_body(const per_channel_cast_args& args) {
    constexpr int LANES = Config::BLOCK_N / CHUNK;     // threads that share a row
    constexpr int STEP = Config::NUM_THREADS / LANES;  // rows that the CTA loads at once
    static_assert(Config::NUM_CHUNKS * STEP == Config::GRAN_K, "the CTA has one block of rows");
    static_assert(Config::BLOCK_N <= Config::NUM_THREADS, "a thread makes at most one scale");
    constexpr int NUM_WARPS = Config::NUM_THREADS / 32;
    alignas(16) __shared__ float warp_amax[NUM_WARPS][Config::BLOCK_N];
    alignas(16) __shared__ float shared_factors[Config::BLOCK_N];

    const uint32_t num_n_blocks = ceil_div(args.cols, Config::BLOCK_N);
    const uint32_t k_block_idx = blockIdx.x / num_n_blocks, n_block_idx = blockIdx.x % num_n_blocks;
    const uint32_t row = k_block_idx * Config::GRAN_K + threadIdx.x / LANES;
    const uint32_t block_col = threadIdx.x % LANES * CHUNK;
    const uint32_t col = n_block_idx * Config::BLOCK_N + block_col;

    // 1. Maxima of columns: of a thread, of the warp's lanes with the same columns, of the CTA.
    Chunk<Config> chunks[Config::NUM_CHUNKS];
#pragma unroll
    for (int c = 0; c < Config::NUM_CHUNKS; ++c) chunks[c].load(args, row + c * STEP, col);
    using Word = typename Chunk<Config>::Word;
#pragma unroll
    for (int c = 0; c < Config::NUM_CHUNKS; ++c) chunks[c].make_infinity_nan();
#pragma unroll
    for (int i = 0; i < Chunk<Config>::NUM_WORDS; ++i) {
        Word largest = {0};
#pragma unroll
        for (int c = 0; c < Config::NUM_CHUNKS; ++c) largest.max_magnitude(chunks[c].words[i]);
#pragma unroll
        for (int offset = LANES; offset < 32; offset *= 2) {
            largest.max_magnitude({__shfl_xor_sync(0xFFFFFFFF, largest.bits, offset)});
        }
        if (threadIdx.x % 32 < LANES) {
#pragma unroll
            for (int e = 0; e < Word::ELEMENTS; ++e) {
                warp_amax[threadIdx.x / 32][block_col + i * Word::ELEMENTS + e] =
                    largest.element(e);
            }
        }
    }
    __syncthreads();

    // 2. One thread per column makes its scale.
    if (threadIdx.x < Config::BLOCK_N) {
        float amax = 0.0f;
#pragma unroll
        for (int w = 0; w < NUM_WARPS; ++w) amax = fmaxf(amax, warp_amax[w][threadIdx.x]);
        const float sf = make_scale(args, amax);
        shared_factors[threadIdx.x] = __frcp_rn(sf);
        const uint32_t sf_col = n_block_idx * Config::BLOCK_N + threadIdx.x;
        if (sf_col < args.cols) args.sf[k_block_idx * args.sf_stride + sf_col] = sf;
    }
    __syncthreads();

    // 3. Scale and store.
    float factors[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) factors[i] = shared_factors[block_col + i];
#pragma unroll
    for (int c = 0; c < Config::NUM_CHUNKS; ++c) {
        store_chunk(args, row + c * STEP, col, chunks[c], [&](int i) { return factors[i]; });
    }
}
