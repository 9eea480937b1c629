// The producer warpgroup: one warp loads A, B and the scales of A, one adds the scales of B.
#pragma once

#include "arguments.cuh"
#include "pipeline.cuh"
#include "ptx/tma.cuh"
#include "shared_storage.cuh"
#include "tile_queue.cuh"

template <class Config>
DEVICE void load_box(uint32_t dst, const TensorMap* map, uint32_t barrier, uint32_t x, uint32_t y,
                     uint16_t peers) {
    if constexpr (SharedStorage<Config>::CLUSTER == 1) {
        tma_load_2d(dst, map, barrier, x, y);
    } else {
        tma_load_2d_multicast(dst, map, barrier, x, y, peers);
    }
}

// The box of A that has the fewest rows, but `num_rows` at least: whole, or a power of two. What it
// brings beyond belongs to others and is not used.
template <int WHOLE>
struct PartBox {
    uint32_t map_idx = 0, rows = WHOLE;

    DEVICE explicit PartBox(uint32_t num_rows) {
        constexpr uint32_t LARGEST = WHOLE > 128 ? 128 : WHOLE > 64 ? 64 : WHOLE > 32 ? 32 : 16;
#pragma unroll
        for (uint32_t i = 0; i < 3; ++i)
            if (num_rows <= LARGEST >> i) map_idx = 1 + i, rows = LARGEST >> i;
        if (num_rows == 0) rows = 0;
    }
};

// Producer, first warp: keeps the ring of stages filled with A, B and the scales of A.
// NOTES: the whole warp walks and one lane issues, so that addresses stay in uniform registers: in
// code that one lane runs alone, TMA is issued a third slower.
template <class Config, class Tiles>
DEVICE void load_tiles(const fp8_gemm_1d2d_args& args, SharedStorage<Config>& storage,
                       Tiles tiles) {
    // Peers along N share A, peers along M share B: each CTA loads its share and multicasts it.
    constexpr int A_ROWS = Config::BLOCK_M / Config::CLUSTER_N;
    constexpr int B_ROWS = Config::BLOCK_N / Config::CLUSTER_M;
    constexpr uint32_t A_BYTES = Config::BLOCK_M * BLOCK_K, B_BYTES = Config::BLOCK_N * BLOCK_K;
    const ClusterRank<Config> rank(blockIdx.x);
    uint16_t peers_along_n = 0, peers_along_m = 0;
    for (int i = 0; i < Config::CLUSTER_N; ++i)
        peers_along_n |= 1 << (i * Config::CLUSTER_M + rank.m);
    for (int i = 0; i < Config::CLUSTER_M; ++i)
        peers_along_m |= 1 << (rank.n * Config::CLUSTER_M + i);

    Pipeline<Config::NUM_STAGES> pipeline(storage.full_barriers, storage.empty_barriers);
    const uint32_t smem_a = shared_address(storage.a) + rank.n * A_ROWS * BLOCK_K;
    const uint32_t smem_b = shared_address(storage.b) + rank.m * B_ROWS * BLOCK_K;
    const uint32_t smem_sfa = shared_address(storage.sfa);
    const uint64_t policy_b = args.is_b_read_once ? EVICT_FIRST : EVICT_NORMAL;

    for (Tile tile; tiles.next(tile);) {
        const uint32_t m_a = tile.m + rank.n * A_ROWS, n_b = tile.n + rank.m * B_ROWS;
        const uint32_t rows_n = rows_inside(tile.n, Config::BLOCK_N, args.shape_n);
        const uint32_t rows_b = rows_inside(n_b, B_ROWS, args.shape_n);
        const TensorMap* map_b = &args.tensor_map_b[rows_b != B_ROWS];
        const uint32_t rows_a = rows_inside(rank.n * A_ROWS, A_ROWS, tile.rows);
        const TensorMap* map_a = &args.tensor_map_a[rows_a != A_ROWS];
        uint32_t rows_m = tile.rows;  // of A that arrive in this CTA
        if constexpr (Config::IS_GROUPED) {
            map_a = &args.tensor_map_a[PartBox<A_ROWS>(rows_a).map_idx];
            rows_m = 0;
#pragma unroll
            for (int i = 0; i < Config::CLUSTER_N; ++i)
                rows_m += PartBox<A_ROWS>(rows_inside(i * A_ROWS, A_ROWS, tile.rows)).rows;
        }
        const uint32_t num_scales =
            Config::IS_GROUPED ? SharedStorage<Config>::SFA_ROWS : (rows_m + 3) / 4 * 4;
        const uint32_t stage_bytes =
            (rows_m + rows_n) * BLOCK_K + num_scales * static_cast<uint32_t>(sizeof(float));
        const TensorMap* map_sfa =
            &args.tensor_map_sfa[!Config::IS_GROUPED && rows_m != Config::BLOCK_M];
        const uint32_t row_b = Config::IS_GROUPED ? tile.group_idx * args.shape_n + n_b : n_b;
        const uint32_t sf_column = tile.sf_column / 4 * 4;
        uint32_t want_at = tile.k_block_begin;
        if constexpr (Config::IS_GROUPED) {
            if (tile.k_block_end > LEAD) want_at = tile.k_block_end - LEAD;
            if (tile.k_block_begin == tile.k_block_end) tiles.want_next();
        }
        for (uint32_t k_block = tile.k_block_begin; k_block < tile.k_block_end; ++k_block) {
            if constexpr (Config::IS_GROUPED)
                if (k_block == want_at) tiles.want_next();
            pipeline.wait_empty();
            const uint32_t full = pipeline.full(), stage = pipeline.stage_idx;
            const uint32_t k = k_block * BLOCK_K;
            const uint32_t dst_a = smem_a + stage * A_BYTES, dst_b = smem_b + stage * B_BYTES;
            const uint32_t dst_sfa = smem_sfa + stage * SharedStorage<Config>::SFA_STRIDE * 4;
            if (elect_one()) {
                mbarrier_arrive_expect_tx(full, stage_bytes);
                // Parts of a unit may lie outside of D; without a cluster, a unit is a tile.
                constexpr bool IS_WHOLE = SharedStorage<Config>::CLUSTER == 1;
                if (IS_WHOLE || rows_a > 0)
                    load_box<Config>(dst_a, map_a, full, k, m_a, peers_along_n);
                if constexpr (Config::IS_GROUPED && IS_WHOLE) {
                    tma_load_2d(dst_b, map_b, full, k, row_b, policy_b);
                } else if (IS_WHOLE || rows_b > 0) {
                    load_box<Config>(dst_b, map_b, full, k, row_b, peers_along_m);
                }
                if (IS_WHOLE || rows_m > 0)
                    tma_load_2d(dst_sfa, map_sfa, full, sf_column, tile.sf_row + k_block);
            }
            __syncwarp();
            pipeline.advance();
        }
    }
    griddepcontrol_launch_dependents();
}

// Producer, second warp: adds the scales of B to each stage. They are too few and too unaligned for
// TMA. Lane i holds those of every 32nd k-block, so that one coalesced load serves 32 stages.
template <class Config, class Tiles>
DEVICE void load_weight_scales(const fp8_gemm_1d2d_args& args, SharedStorage<Config>& storage,
                               Tiles tiles) {
    constexpr int COUNT = SharedStorage<Config>::NUM_SFB;
    const uint32_t lane_idx = threadIdx.x % 32, last_row = (args.shape_n - 1) / 128;
    Pipeline<Config::NUM_STAGES> pipeline(storage.full_barriers, storage.empty_barriers);

    for (Tile tile; tiles.next(tile);) {
        const uint32_t row = tile.n / 128;
        const float* base = args.sfb;
        if constexpr (Config::IS_GROUPED) base += int64_t{tile.group_idx} * args.sfb_stride_group;
        const float* sfb[COUNT];  // of columns past the last row, which do not exist: any scale
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            sfb[i] = base + int64_t{min(row + i, last_row)} * args.sfb_stride_n;
        for (uint32_t begin = tile.k_block_begin; begin < tile.k_block_end; begin += 32) {
            const uint32_t count = min(32, tile.k_block_end - begin);
            float scale[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                scale[i] = sfb[i][int64_t{begin + min(lane_idx, count - 1)} * args.sfb_stride_k];
            for (uint32_t step = 0; step < count; ++step) {
                pipeline.wait_empty();
                if (lane_idx == step) {
#pragma unroll
                    for (int i = 0; i < COUNT; ++i) storage.sfb[pipeline.stage_idx][i] = scale[i];
                    mbarrier_arrive(pipeline.full());
                }
                __syncwarp();
                pipeline.advance();
            }
        }
    }
}
