// Scales [num_groups, mn, num_k_blocks] in any layout -> out[group][k_block][mn], MN-major, its rows
// out_stride apart. What lies between mn and out_stride is not written.
//
// A CTA takes a tile of TILE_MN x TILE_K. Whichever dimension has adjacent elements is read along, so
// that a warp reads whole lines; shared memory turns the tile.
#pragma once

#include "ptx/types.cuh"

struct transpose_scales_args {
    const float* sf;        // scales to read
    float* out;             // [num_groups, num_k_blocks, out_stride]
    int64_t stride_group;   // of sf, elements
    int64_t stride_mn;      // of sf, elements
    int64_t stride_k;       // of sf, elements
    int64_t out_stride;     // elements
    uint32_t mn;            // rows of a group
    uint32_t num_k_blocks;  // columns
};

template <class Config>
__host__ __device__ constexpr int transpose_scales_threads() {
    return Config::NUM_THREADS;
}

template <class Config>
DEVICE void transpose_scales_body(const transpose_scales_args& args) {
    constexpr int TILE_MN = Config::TILE_MN, TILE_K = Config::TILE_K;
    constexpr int NUM_ELEMENTS = TILE_MN * TILE_K / Config::NUM_THREADS;  // of the tile, per thread
    static_assert(NUM_ELEMENTS * Config::NUM_THREADS == TILE_MN * TILE_K,
                  "threads divide the tile");
    __shared__ float tile[TILE_K][TILE_MN + 1];  // + 1: no bank conflicts in either direction

    const uint32_t num_k_tiles = (args.num_k_blocks + TILE_K - 1) / TILE_K;
    const uint32_t num_mn_tiles = (args.mn + TILE_MN - 1) / TILE_MN;
    const uint32_t k_begin = blockIdx.x % num_k_tiles * TILE_K;
    const uint32_t mn_begin = blockIdx.x / num_k_tiles % num_mn_tiles * TILE_MN;
    const uint32_t group_idx = blockIdx.x / num_k_tiles / num_mn_tiles;
    const bool is_mn_major = args.stride_mn == 1;

    const float* sf = args.sf + group_idx * args.stride_group;
#pragma unroll
    for (int i = 0; i < NUM_ELEMENTS; ++i) {
        const uint32_t index = i * Config::NUM_THREADS + threadIdx.x;
        const uint32_t tile_mn = is_mn_major ? index % TILE_MN : index / TILE_K;
        const uint32_t tile_k = is_mn_major ? index / TILE_MN : index % TILE_K;
        const uint32_t mn_idx = mn_begin + tile_mn, k_idx = k_begin + tile_k;
        if (mn_idx < args.mn && k_idx < args.num_k_blocks) {
            tile[tile_k][tile_mn] = __ldg(sf + mn_idx * args.stride_mn + k_idx * args.stride_k);
        }
    }
    __syncthreads();

    float* out = args.out + int64_t(group_idx) * args.num_k_blocks * args.out_stride;
#pragma unroll
    for (int i = 0; i < NUM_ELEMENTS; ++i) {
        const uint32_t index = i * Config::NUM_THREADS + threadIdx.x;
        const uint32_t mn_idx = mn_begin + index % TILE_MN, k_idx = k_begin + index / TILE_MN;
        if (mn_idx < args.mn && k_idx < args.num_k_blocks) {
            out[k_idx * args.out_stride + mn_idx] = tile[index / TILE_MN][index % TILE_MN];
        }
    }
}
