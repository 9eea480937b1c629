// The second level of the accumulation: partial sums of one k-block, exact to about 14 bits in the
// tensor core, are scaled and added up in float32. (DeepSeek-V3 Technical Report, section 3.3.2.)
#pragma once

#include "scheduler.cuh"
#include "shared_storage.cuh"

// Scales of B for one tile. A weight scale covers 128 x 128 elements, so a tile needs one a k-block,
// or two if it crosses a multiple of 128 columns. They are the same for all threads: each lane holds
// the scale of one of the next 32 k-blocks and hands it out by shuffle. That costs a coalesced load
// every 32 k-blocks, no shared memory and no barrier.
template <class Config>
struct WeightScales {
    static constexpr bool CROSSES = 128 % Config::BLOCK_N != 0;
    static constexpr int COUNT = CROSSES ? 2 : 1;
    // Greatest common divisor of BLOCK_N and 128: the largest power of two in BLOCK_N.
    static constexpr int GRANULARITY = Config::BLOCK_N & -Config::BLOCK_N;
    static_assert(Config::BLOCK_N <= 128 + GRANULARITY, "a tile may touch two weight scales only");

    const float* row[COUNT];  // the scales of one block of 128 columns, along K
    uint32_t stride_k;
    uint32_t k_block_end;
    float current[COUNT];  // lane i: k-block 32 * j + i
    float ahead[COUNT];    // lane i: k-block 32 * (j + 1) + i
    uint32_t first_columns = Config::BLOCK_N;  // columns of the tile that scale 0 covers

    DEVICE void load(float (&scales)[COUNT], uint32_t k_block) const {
        k_block += threadIdx.x % 32;
        for (int i = 0; i < COUNT; ++i)
            scales[i] = k_block < k_block_end ? __ldg(row[i] + int64_t{k_block} * stride_k) : 0.f;
    }

    // Starts the loads for a tile; their latency may hide behind the epilogue of the tile before.
    DEVICE void start(const float* sfb, uint32_t stride_n, uint32_t stride_k_, uint32_t shape_n,
                      const Tile& tile) {
        const uint32_t n = tile.n_block_idx * Config::BLOCK_N;
        const uint32_t last_row = (shape_n - 1) / 128;
        stride_k = stride_k_;
        k_block_end = tile.k_block_end;
        for (int i = 0; i < COUNT; ++i)
            row[i] = sfb + int64_t{n / 128 + i < last_row ? n / 128 + i : last_row} * stride_n;
        if constexpr (CROSSES) first_columns = 128 - n % 128;
        load(current, tile.k_block_begin);
        load(ahead, tile.k_block_begin + 32);
    }

    // The scale of block column `i` at `step` k-blocks after the tile's first.
    DEVICE float get(int i, uint32_t step) const {
        return __shfl_sync(0xFFFFFFFF, current[i], step % 32);
    }

    DEVICE void advance(uint32_t k_block, uint32_t step) {
        if (step % 32 == 31) {
            for (int i = 0; i < COUNT; ++i) current[i] = ahead[i];
            load(ahead, k_block + 33);
        }
    }
};

// accum += (scale of the row) * (scale of the column) * partial, for the 64 x BLOCK_N partial of one
// wgmma wave. This thread holds two rows; scale[i][h] belongs to row half h and weight scale i.
template <class Config>
DEVICE void promote(float (&accum)[Config::BLOCK_N / 2], const float (&partial)[Config::BLOCK_N / 2],
                    const float (&scale)[WeightScales<Config>::COUNT][2], uint32_t first_columns) {
    float upper = scale[0][0], lower = scale[0][1];
#pragma unroll
    for (int j = 0; j < Config::BLOCK_N / 8; ++j) {
        // Tiles start at multiples of BLOCK_N, so a weight scale can end only at multiples of what
        // BLOCK_N and 128 have in common; elsewhere nothing is compared.
        if constexpr (WeightScales<Config>::CROSSES) {
            if (j > 0 && j * 8 % WeightScales<Config>::GRANULARITY == 0 && j * 8 == first_columns) {
                upper = scale[1][0];
                lower = scale[1][1];
            }
        }
        accum[4 * j + 0] += upper * partial[4 * j + 0];
        accum[4 * j + 1] += upper * partial[4 * j + 1];
        accum[4 * j + 2] += lower * partial[4 * j + 2];
        accum[4 * j + 3] += lower * partial[4 * j + 3];
    }
}
