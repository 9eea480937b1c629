// D[m, n] = bf16( sum over k-blocks b of SFA[m, b] * SFB[n / 128, b] * (A[m, b] . B[n, b]) )
//
// FP8 (E4M3) GEMM with one scale per 1 x 128 of A and per 128 x 128 of B ("1D2D"), for Hopper.
// Read this file from top to bottom; docs/kernel_tour.md explains it with pictures.
//
//   global memory --TMA--> shared memory --wgmma--> partial --promote--> accum --TMA--> global memory
//                 producer                        consumers
//
// One CTA per SM stays for the whole launch ("persistent") and works through tiles of D. One thread
// of the producer warpgroup keeps a ring of shared-memory stages filled by TMA; one to three consumer
// warpgroups run the tensor cores, each on its own 64-row waves of the tile. They meet only at the
// barriers of shared_storage.cuh, so loads run ahead across tiles, and hide behind the epilogue.
#pragma once

#include "epilogue.cuh"
#include "pipeline.cuh"
#include "promote.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler.cuh"
#include "shared_storage.cuh"

struct fp8_gemm_1d2d_args {
    TensorMap tensor_map_a;    // e4m3 [shape_m, shape_k], box 128 x (BLOCK_M / CLUSTER_N), 128 B swizzle
    TensorMap tensor_map_b;    // e4m3 [shape_n, shape_k], box 128 x (BLOCK_N / CLUSTER_M), 128 B swizzle
    TensorMap tensor_map_sfa;  // float32 [k-blocks, shape_m], box BLOCK_M x 1
    TensorMap tensor_map_d;    // bf16 [shape_m, shape_n], box SLAB_N x 16, swizzle SLAB_N * 2 B
    const float* sfb;          // float32, element [i, b] at sfb[i * sfb_stride_n + b * sfb_stride_k]
    uint32_t sfb_stride_n;     // elements
    uint32_t sfb_stride_k;     // elements
    uint32_t shape_m;          // rows of A and D
    uint32_t shape_n;          // rows of B, columns of D
    uint32_t shape_k;          // channels
    uint32_t stage_bytes;      // what TMA delivers to each stage of each CTA
    uint32_t raster_m;         // height of a raster band, in clusters
};

template <class Config>
constexpr int fp8_gemm_1d2d_threads() {
    return Config::NUM_THREADS;
}

// Registers per thread that the two roles trade with setmaxnreg: 64K registers / SM.
template <class Config>
struct Registers {
    static constexpr int PRODUCER = Config::NUM_CONSUMERS == 3 ? 24 : 40;
    static constexpr int CONSUMER = Config::NUM_CONSUMERS == 3 ? 160 : 232;
};

template <class Config>
DEVICE void fp8_gemm_1d2d_producer(const fp8_gemm_1d2d_args& args, SharedStorage<Config>& storage,
                                   DenseScheduler<Config> scheduler) {
    constexpr int A_ROWS = Config::BLOCK_M / Config::CLUSTER_N;  // rows this CTA loads for its peers too
    constexpr int B_ROWS = Config::BLOCK_N / Config::CLUSTER_M;
    constexpr uint32_t A_BYTES = Config::BLOCK_M * BLOCK_K, B_BYTES = Config::BLOCK_N * BLOCK_K;
    // CTA (rank_m, rank_n) has rank rank_n * CLUSTER_M + rank_m in its cluster. Peers along N share A,
    // peers along M share B: each loads its share and multicasts it.
    uint16_t peers_along_n = 0, peers_along_m = 0;
    for (int i = 0; i < Config::CLUSTER_N; ++i)
        peers_along_n |= 1 << (i * Config::CLUSTER_M + scheduler.rank_m);
    for (int i = 0; i < Config::CLUSTER_M; ++i)
        peers_along_m |= 1 << (scheduler.rank_n * Config::CLUSTER_M + i);

    Pipeline<Config::NUM_STAGES> pipeline(storage.full_barriers, storage.empty_barriers);
    const uint32_t smem_a = shared_address(storage.a) + scheduler.rank_n * A_ROWS * BLOCK_K;
    const uint32_t smem_b = shared_address(storage.b) + scheduler.rank_m * B_ROWS * BLOCK_K;
    const uint32_t smem_sfa = shared_address(storage.sfa);

    Tile tile;
    while (scheduler.next(tile)) {
        const uint32_t m = tile.m_block_idx * Config::BLOCK_M, n = tile.n_block_idx * Config::BLOCK_N;
        for (uint32_t k_block = tile.k_block_begin; k_block < tile.k_block_end; ++k_block) {
            pipeline.wait_empty();
            mbarrier_arrive_expect_tx(pipeline.full(), args.stage_bytes);
            const uint32_t stage = pipeline.stage_idx, k = k_block * BLOCK_K;
            tma_load_2d(smem_sfa + stage * Config::BLOCK_M * 4, &args.tensor_map_sfa, pipeline.full(), m,
                        k_block);
            const uint32_t dst_a = smem_a + stage * A_BYTES, dst_b = smem_b + stage * B_BYTES;
            const uint32_t m_a = m + scheduler.rank_n * A_ROWS, n_b = n + scheduler.rank_m * B_ROWS;
            if constexpr (Config::CLUSTER_N == 1)
                tma_load_2d(dst_a, &args.tensor_map_a, pipeline.full(), k, m_a);
            else
                tma_load_2d_multicast(dst_a, &args.tensor_map_a, pipeline.full(), k, m_a, peers_along_n);
            if constexpr (Config::CLUSTER_M == 1)
                tma_load_2d(dst_b, &args.tensor_map_b, pipeline.full(), k, n_b);
            else
                tma_load_2d_multicast(dst_b, &args.tensor_map_b, pipeline.full(), k, n_b, peers_along_m);
            pipeline.advance();
        }
    }
    griddepcontrol_launch_dependents();
}

template <class Config>
DEVICE void fp8_gemm_1d2d_consumer(const fp8_gemm_1d2d_args& args, SharedStorage<Config>& storage,
                                   DenseScheduler<Config> scheduler, uint32_t warpgroup_idx) {
    constexpr int CLUSTER = SharedStorage<Config>::CLUSTER;
    constexpr int WAVES = Config::BLOCK_M / WGMMA_M / Config::NUM_CONSUMERS;  // 64-row wgmmas per warpgroup
    constexpr int COUNT = WeightScales<Config>::COUNT;
    static_assert(WAVES * WGMMA_M * Config::NUM_CONSUMERS == Config::BLOCK_M, "waves fill the tile");
    const uint32_t warp_idx = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), lane_idx = threadIdx.x % 32;
    const uint32_t first_row = warpgroup_idx * WAVES * WGMMA_M;  // of this warpgroup in the tile

    Pipeline<Config::NUM_STAGES> pipeline(storage.full_barriers, storage.empty_barriers);
    uint32_t smem_a = shared_address(storage.a) + first_row * BLOCK_K;
    uint32_t smem_b = shared_address(storage.b);
    uint32_t smem_sfa = shared_address(storage.sfa) +
                        (first_row + warp_idx % 4 * WARP_M + lane_idx / 4) * sizeof(float);
    pin(smem_a), pin(smem_b), pin(smem_sfa);
    Epilogue<Config> epilogue{shared_address(storage.d[warp_idx])};
    WeightScales<Config> weight_scales;

    Tile tile;
    bool has_tile = scheduler.next(tile);
    if (has_tile) weight_scales.start(args.sfb, args.sfb_stride_n, args.sfb_stride_k, args.shape_n, tile);
    while (has_tile) {
        float accum[WAVES][Config::BLOCK_N / 2] = {};
        for (uint32_t k_block = tile.k_block_begin; k_block < tile.k_block_end; ++k_block) {
            pipeline.wait_full();
            const uint32_t stage = pipeline.stage_idx, step = k_block - tile.k_block_begin;
            const uint64_t desc_b = wgmma_descriptor(smem_b + stage * Config::BLOCK_N * BLOCK_K);
            float scale_a[WAVES][2], scale_b[COUNT];
#pragma unroll
            for (int wave = 0; wave < WAVES; ++wave) {
                // First level: 128 channels in the tensor core.
                float partial[Config::BLOCK_N / 2];
                const uint64_t desc_a = wgmma_descriptor(
                    smem_a + (stage * Config::BLOCK_M + wave * WGMMA_M) * BLOCK_K);
                fence_registers(partial);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < BLOCK_K / WGMMA_K; ++k)
                    Wgmma<Config::BLOCK_N>::mma(partial, desc_a + k * (WGMMA_K / 16),
                                                desc_b + k * (WGMMA_K / 16), k > 0);
                wgmma_commit_group();
                // NOTES: the scales are read after the wgmmas are issued, so that their latency hides
                // behind them; reading them before costs as much as a whole pipeline stage.
                if (wave == 0) {
#pragma unroll
                    for (int i = 0; i < WAVES * 2; ++i)
                        scale_a[i / 2][i % 2] = ld_shared_f32(
                            smem_sfa + (stage * Config::BLOCK_M + i / 2 * WGMMA_M + i % 2 * 8) * 4);
#pragma unroll
                    for (int i = 0; i < COUNT; ++i) scale_b[i] = weight_scales.get(i, step);
                }
                wgmma_wait_group<0>();
                fence_registers(partial);
                // The stage may be refilled as soon as the last wave has read it: lane r of each warp
                // tells CTA r of the cluster, whose multicast also writes here.
                if (wave == WAVES - 1) {
                    if constexpr (CLUSTER == 1) {
                        if (lane_idx == 0) mbarrier_arrive(pipeline.empty());
                    } else {
                        if (lane_idx < CLUSTER) mbarrier_arrive_cluster(pipeline.empty(), lane_idx);
                    }
                }
                // Second level: float32 on the CUDA cores.
                float scale[COUNT][2];
#pragma unroll
                for (int i = 0; i < COUNT * 2; ++i)
                    scale[i / 2][i % 2] = scale_a[wave][i % 2] * scale_b[i / 2];
                promote<Config>(accum[wave], partial, scale, weight_scales.first_columns);
            }
            weight_scales.advance(k_block, step);
            pipeline.advance();
        }
        const uint32_t m = tile.m_block_idx * Config::BLOCK_M + first_row + warp_idx % 4 * WARP_M;
        const uint32_t n = tile.n_block_idx * Config::BLOCK_N;
        has_tile = scheduler.next(tile);
        if (has_tile)
            weight_scales.start(args.sfb, args.sfb_stride_n, args.sfb_stride_k, args.shape_n, tile);
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave)
            epilogue.store(&args.tensor_map_d, accum[wave], m + wave * WGMMA_M, n);
    }
    epilogue.drain();
}

template <class Config>
DEVICE void fp8_gemm_1d2d_body(const fp8_gemm_1d2d_args& args) {
    static_assert(sizeof(SharedStorage<Config>) == Config::SMEM_BYTES, "plan.py computes the same size");
    static_assert(Config::NUM_THREADS == WARPGROUP * (Config::NUM_CONSUMERS + 1), "one producer warpgroup");
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& storage = *reinterpret_cast<SharedStorage<Config>*>(smem);

    // 1. One thread prepares; then every CTA of the cluster knows that all barriers are ready.
    if (threadIdx.x == 0) {
        prefetch_tensormap(&args.tensor_map_a);
        prefetch_tensormap(&args.tensor_map_b);
        prefetch_tensormap(&args.tensor_map_sfa);
        prefetch_tensormap(&args.tensor_map_d);
        storage.init_barriers();
    }
    if constexpr (SharedStorage<Config>::CLUSTER == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }

    // 2. Everything above may overlap the end of the kernel before (PDL); from here on data is read.
    griddepcontrol_wait();

    // 3. The roles.
    const DenseScheduler<Config> scheduler(
        (args.shape_m + Config::BLOCK_M - 1) / Config::BLOCK_M,
        (args.shape_n + Config::BLOCK_N - 1) / Config::BLOCK_N, (args.shape_k + BLOCK_K - 1) / BLOCK_K,
        args.raster_m, blockIdx.x, gridDim.x);
    const uint32_t warpgroup_idx = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARPGROUP, 0);
    if (warpgroup_idx == Config::NUM_CONSUMERS) {
        setmaxnreg_dec<Registers<Config>::PRODUCER>();
        if (threadIdx.x == Config::NUM_CONSUMERS * WARPGROUP)
            fp8_gemm_1d2d_producer<Config>(args, storage, scheduler);
    } else {
        setmaxnreg_inc<Registers<Config>::CONSUMER>();
        fp8_gemm_1d2d_consumer<Config>(args, storage, scheduler, warpgroup_idx);
    }

    // 4. No CTA leaves while a peer may still arrive at its barriers.
    if constexpr (SharedStorage<Config>::CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
    }
}
