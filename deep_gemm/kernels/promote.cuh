// The second level of the accumulation: partial sums of one k-block, exact to about 14 bits in the
// tensor core, are scaled and added up in float32. (DeepSeek-V3 Technical Report, section 3.3.2.)
#pragma once

#include "shared_storage.cuh"

// accum += (scale of the row) * (scale of the column) * partial, for the 64 x BLOCK_N partial of one
// wgmma wave. This thread holds two rows: scale[i][h] belongs to row half h and weight scale i, and
// the tile's first `first_columns` columns take weight scale 0.
template <class Config>
DEVICE void promote(float (&accum)[Config::BLOCK_N / 2],
                    const float (&partial)[Config::BLOCK_N / 2],
                    const float (&scale)[SharedStorage<Config>::NUM_SFB][2],
                    uint32_t first_columns) {
    // Tiles start at multiples of BLOCK_N, so a weight scale can end only at multiples of what
    // BLOCK_N and 128 have in common: the largest power of two in BLOCK_N.
    constexpr int GRANULARITY = Config::BLOCK_N & -Config::BLOCK_N;
    static_assert(Config::BLOCK_N <= 128 + GRANULARITY, "a tile may touch two weight scales only");
    float upper = scale[0][0], lower = scale[0][1];
#pragma unroll
    for (int j = 0; j < Config::BLOCK_N / 8; ++j) {
        if constexpr (SharedStorage<Config>::NUM_SFB == 2) {
            if (j > 0 && j * 8 % GRANULARITY == 0 && j * 8 == first_columns) {
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
