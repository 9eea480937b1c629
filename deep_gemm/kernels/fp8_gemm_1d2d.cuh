// D[m, n] = bf16( sum over k-blocks b of SFA[m, b] * SFB[n / 128, b] * (A[m, b] . B[n, b]) )
//
// FP8 (E4M3) GEMM with one scale per 1 x 128 of A and per 128 x 128 of B ("1D2D"), for Hopper.
// Read this file from top to bottom; docs/kernel_tour.md explains it with pictures.
//
//   global memory --TMA--> shared memory --wgmma--> partial --promote--> accum --TMA--> global memory
//                 producer                        consumers
//
// One CTA per SM stays for the whole launch ("persistent") and works through tiles of D. Two
// warps of the producer warpgroup keep a ring of shared-memory stages filled; one to three consumer
// warpgroups run the tensor cores, each on its own 64-row waves of the tile. They meet only at the
// barriers of shared_storage.cuh, so loads run ahead across tiles, and hide behind the epilogue.
//
// In a grouped kernel (IS_GROUPED) rows of A belong to groups with a B of their own. There a third
// warp of the producer finds the tiles and hands them to the other roles; all else is the same.
#pragma once

#include "arguments.cuh"
#include "consumer.cuh"
#include "producer.cuh"
#include "scheduler.cuh"
#include "shared_storage.cuh"
#include "tile_queue.cuh"

template <class Config>
__host__ __device__ constexpr int fp8_gemm_1d2d_threads() {
    return Config::NUM_THREADS;
}

// The roles, each with its own walk over the tiles of this CTA.
template <class Config, class Tiles>
DEVICE void run_roles(const fp8_gemm_1d2d_args& args, SharedStorage<Config>& storage, Tiles tiles) {
    // They trade registers: 64K are there, 512 for each row of four warps.
    constexpr int PRODUCER_REGISTERS = 56;
    constexpr int CONSUMER_REGISTERS = Config::NUM_CONSUMERS == 3 ? 152 : 224;
    const uint32_t warpgroup_idx = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARPGROUP, 0);
    if (warpgroup_idx == Config::NUM_CONSUMERS) {
        if constexpr (Config::NUM_CONSUMERS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
        const uint32_t warp_idx = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32 % 4, 0);
        if (warp_idx == 0) load_tiles<Config>(args, storage, tiles);
        if (warp_idx == 1) load_weight_scales<Config>(args, storage, tiles);
        if constexpr (Config::IS_GROUPED)
            if (warp_idx == 2) schedule_tiles<Config>(args, storage);
    } else {
        if constexpr (Config::NUM_CONSUMERS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
        compute_tiles<Config>(args, storage, tiles, warpgroup_idx);
    }
}

template <class Config>
DEVICE void fp8_gemm_1d2d_body(const fp8_gemm_1d2d_args& args) {
    static_assert(sizeof(SharedStorage<Config>) == Config::SMEM_BYTES,
                  "plan.py computes the same size");
    static_assert(SharedStorage<Config>::CLUSTER <= 2,
                  "each CTA of a cluster feeds every other one");
    static_assert(Config::BLOCK_M % (8 * Config::CLUSTER_N) == 0,
                  "shares keep the swizzle's period");
    static_assert(Config::BLOCK_N % (8 * Config::CLUSTER_M) == 0,
                  "shares keep the swizzle's period");
    static_assert(Config::NUM_THREADS == WARPGROUP * (Config::NUM_CONSUMERS + 1),
                  "one producer warpgroup");
    extern __shared__ __align__(1024) uint8_t smem[];
    auto& storage = *reinterpret_cast<SharedStorage<Config>*>(smem);

    // 1. One thread prepares; then every CTA of the cluster knows that all barriers are ready.
    if (threadIdx.x == 0) {
        const bool is_edge_m = !Config::IS_GROUPED && args.shape_m < Config::BLOCK_M;
        prefetch_tensormap(&args.tensor_map_a[is_edge_m]);
        prefetch_tensormap(&args.tensor_map_b[0]);
        prefetch_tensormap(&args.tensor_map_sfa[is_edge_m]);
        prefetch_tensormap(&args.tensor_map_d);
        storage.init_barriers();
    }
    if constexpr (SharedStorage<Config>::CLUSTER == 1) {
        __syncthreads();
    } else {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    }

    // 2. Everything above may overlap the end of the kernel before (PDL); from here on data is read.
    griddepcontrol_wait();

    // 3. Producer and consumers work through the tiles.
    if constexpr (Config::IS_GROUPED) {
        run_roles<Config>(args, storage, QueuedTiles<Config>(storage));
    } else {
        run_roles<Config>(args, storage,
                          DenseScheduler<Config>(args.shape_m, args.shape_n,
                                                 (args.shape_k + BLOCK_K - 1) / BLOCK_K,
                                                 args.raster_m, blockIdx.x, gridDim.x));
    }

    // 4. No CTA leaves while a peer may still arrive at its barriers.
    if constexpr (SharedStorage<Config>::CLUSTER > 1) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    }
}
