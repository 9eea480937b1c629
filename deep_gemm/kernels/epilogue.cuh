// Registers -> bf16 -> shared memory -> TMA store of D. Each warp works alone, on its own 16 rows and
// its own ring of slabs, so the epilogue needs no barrier between warps.
#pragma once

#include "arguments.cuh"
#include "ptx/matrix.cuh"
#include "ptx/tma.cuh"
#include "shared_storage.cuh"

constexpr uint32_t ALL_ROWS = (1 << WARP_M) - 1;  // a bit for each row of a warp

// Byte offset of 16-byte chunk `chunk` of row `row` in a slab of SLAB_N bf16 columns, as TMA's swizzle
// of that width places it: the address bits from 4 up are XORed with the bits from 7 up.
template <int SLAB_N>
DEVICE uint32_t slab_offset(uint32_t row, uint32_t chunk) {
    constexpr uint32_t ROW_BYTES = SLAB_N * 2;
    const uint32_t offset = row * ROW_BYTES + chunk * 16;
    return offset ^ ((offset >> 7) % (ROW_BYTES / 16) << 4);
}

template <class Config>
struct Epilogue {
    static constexpr int SLABS_PER_WAVE = Config::BLOCK_N / Config::SLAB_N;
    static constexpr uint32_t SLAB_BYTES = WARP_M * Config::SLAB_N * 2;
    static_assert(Config::BLOCK_N % Config::SLAB_N == 0, "slabs divide the tile");

    uint32_t ring;          // shared address of this warp's slabs
    uint32_t slab_idx = 0;  // next slab of the ring

    // Writes the 16 x BLOCK_N part of one wave that this warp holds to D at (m, n).
    DEVICE void store(const TensorMap* tensor_map_d, const float (&accum)[Config::BLOCK_N / 2],
                      uint32_t m, uint32_t n) {
        const uint32_t lane_idx = threadIdx.x % 32;
#pragma unroll
        for (int s = 0; s < SLABS_PER_WAVE; ++s) {
            const uint32_t slab = ring + slab_idx * SLAB_BYTES;
            // Only lane 0 stores, so only it can wait until TMA has read the slab's last content.
            if (lane_idx == 0) tma_store_wait_group_read<Config::NUM_D_SLABS - 1>();
            __syncwarp();
#pragma unroll
            for (int c = 0; c < Config::SLAB_N / 16; ++c) {
                const float* pair =
                    &accum[(s * Config::SLAB_N / 8 + 2 * c) * 4];  // two 8-column groups
                stmatrix_x4(
                    slab + slab_offset<Config::SLAB_N>(lane_idx % 16, 2 * c + lane_idx / 16),
                    cvt_bf16x2(pair[0], pair[1]), cvt_bf16x2(pair[2], pair[3]),
                    cvt_bf16x2(pair[4], pair[5]), cvt_bf16x2(pair[6], pair[7]));
            }
            fence_proxy_async_shared();
            __syncwarp();
            if (lane_idx == 0) {
                tma_store_2d(tensor_map_d, slab, n + s * Config::SLAB_N, m);
                tma_store_commit_group();
            }
            slab_idx = slab_idx + 1 == Config::NUM_D_SLABS ? 0 : slab_idx + 1;
        }
    }

    // The same where some of the 16 rows belong to another group, or to nobody: those whose bit in
    // `stored` is set are written, as zeros where that in `valid` is not. TMA would write them all,
    // and for a few rows it is not worth its wait.
    DEVICE void store_rows(const fp8_gemm_1d2d_args& args,
                           const float (&accum)[Config::BLOCK_N / 2], uint32_t m, uint32_t n,
                           uint32_t valid, uint32_t stored) const {
        const uint32_t lane_idx = threadIdx.x % 32;
        const uint32_t column = n + lane_idx % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t row = lane_idx / 4 + half * 8;
            const bool is_stored = stored >> row & 1;
            const uint32_t keep = valid >> row & 1 ? 0xFFFFFFFF : 0;
            const uint16_t* d = args.d + int64_t{m + row} * args.d_stride + column;
#pragma unroll
            for (int j = 0; j < Config::BLOCK_N / 8; ++j)
                st_global_b32_if(
                    is_stored && column + 8 * j < args.shape_n, d + 8 * j,
                    cvt_bf16x2(accum[4 * j + 2 * half], accum[4 * j + 2 * half + 1]) & keep);
        }
    }

    // Shared memory must outlive the last reads of it.
    DEVICE void drain() const {
        if (threadIdx.x % 32 == 0) tma_store_wait_group_read<0>();
    }
};
