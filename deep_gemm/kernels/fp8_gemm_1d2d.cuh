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
#pragma once

#include "epilogue.cuh"
#include "pipeline.cuh"
#include "promote.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler.cuh"
#include "shared_storage.cuh"

// NOTES: boxes that reach outside the tensor would be filled with zeros, but slowly: TMA takes about
// 8 clocks for each row that is not there (measured: m = 65 took twice as long as m = 128). So edge
// tiles are loaded through maps of their own, [1], whose boxes end where the tensor ends. The rest of
// such a stage keeps what it had: rows of D depend only on their own row of A, columns on theirs of
// B, and what is outside of D is not stored.
struct fp8_gemm_1d2d_args {
    // e4m3 [shape_m, shape_k]: boxes of BLOCK_M / CLUSTER_N rows x 128 channels, 128-byte swizzle
    TensorMap tensor_map_a[2];
    // e4m3 [shape_n, shape_k]: boxes of BLOCK_N / CLUSTER_M rows x 128 channels, 128-byte swizzle
    TensorMap tensor_map_b[2];
    // float32 [k-blocks, shape_m]: boxes of 1 x BLOCK_M scales; those at the edge a multiple of 4
    TensorMap tensor_map_sfa[2];
    // bf16 [shape_m, shape_n]: boxes of 16 rows x SLAB_N columns, swizzle of their width
    TensorMap tensor_map_d;
    // float32, row i and k-block b at sfb[i * sfb_stride_n + b * sfb_stride_k]
    const float* sfb;
    uint32_t sfb_stride_n;
    uint32_t sfb_stride_k;
    uint32_t shape_m;   // rows of A and D
    uint32_t shape_n;   // rows of B, columns of D
    uint32_t shape_k;   // channels
    uint32_t raster_m;  // height of a raster band, in clusters
};

template <class Config>
__host__ __device__ constexpr int fp8_gemm_1d2d_threads() {
    return Config::NUM_THREADS;
}

// How many of `count` rows from `first` on there are in a matrix of `total` rows.
DEVICE uint32_t rows_inside(uint32_t first, uint32_t count, uint32_t total) {
    return first < total ? min(count, total - first) : 0;
}

// Producer, first warp: keeps the ring of stages filled with A, B and the scales of A.
// NOTES: the whole warp walks and one lane issues, so that addresses stay in uniform registers: in
// code that one lane runs alone, TMA is issued a third slower.
template <class Config>
DEVICE void load_tiles(const fp8_gemm_1d2d_args& args, SharedStorage<Config>& storage,
                       DenseScheduler<Config> scheduler) {
    constexpr int CLUSTER = SharedStorage<Config>::CLUSTER;
    // Peers along N share A, peers along M share B: each CTA loads its share and multicasts it.
    constexpr int A_ROWS = Config::BLOCK_M / Config::CLUSTER_N;
    constexpr int B_ROWS = Config::BLOCK_N / Config::CLUSTER_M;
    constexpr uint32_t A_BYTES = Config::BLOCK_M * BLOCK_K, B_BYTES = Config::BLOCK_N * BLOCK_K;
    // CTA (rank_m, rank_n) has rank rank_n * CLUSTER_M + rank_m in its cluster.
    uint16_t peers_along_n = 0, peers_along_m = 0;
    for (int i = 0; i < Config::CLUSTER_N; ++i)
        peers_along_n |= 1 << (i * Config::CLUSTER_M + scheduler.rank_m);
    for (int i = 0; i < Config::CLUSTER_M; ++i)
        peers_along_m |= 1 << (scheduler.rank_n * Config::CLUSTER_M + i);

    Pipeline<Config::NUM_STAGES> pipeline(storage.full_barriers, storage.empty_barriers);
    const uint32_t smem_a = shared_address(storage.a) + scheduler.rank_n * A_ROWS * BLOCK_K;
    const uint32_t smem_b = shared_address(storage.b) + scheduler.rank_m * B_ROWS * BLOCK_K;
    const uint32_t smem_sfa = shared_address(storage.sfa);

    for (Tile tile; scheduler.next(tile);) {
        const uint32_t m = tile.m_block_idx * Config::BLOCK_M;
        const uint32_t n = tile.n_block_idx * Config::BLOCK_N;
        const uint32_t m_a = m + scheduler.rank_n * A_ROWS, n_b = n + scheduler.rank_m * B_ROWS;
        const uint32_t rows_m = rows_inside(m, Config::BLOCK_M, args.shape_m);
        const uint32_t rows_n = rows_inside(n, Config::BLOCK_N, args.shape_n);
        const uint32_t rows_a = rows_inside(m_a, A_ROWS, args.shape_m);
        const uint32_t rows_b = rows_inside(n_b, B_ROWS, args.shape_n);
        const TensorMap* map_a = &args.tensor_map_a[rows_a != A_ROWS];
        const TensorMap* map_b = &args.tensor_map_b[rows_b != B_ROWS];
        const TensorMap* map_sfa = &args.tensor_map_sfa[rows_m != Config::BLOCK_M];
        const uint32_t stage_bytes = (rows_m + rows_n) * BLOCK_K + (rows_m + 3) / 4 * 16;
        for (uint32_t k_block = tile.k_block_begin; k_block < tile.k_block_end; ++k_block) {
            pipeline.wait_empty();
            const uint32_t full = pipeline.full(), stage = pipeline.stage_idx;
            const uint32_t k = k_block * BLOCK_K;
            const uint32_t dst_a = smem_a + stage * A_BYTES, dst_b = smem_b + stage * B_BYTES;
            const uint32_t dst_sfa = smem_sfa + stage * Config::BLOCK_M * sizeof(float);
            if (elect_one()) {
                mbarrier_arrive_expect_tx(full, stage_bytes);
                if constexpr (CLUSTER == 1) {
                    tma_load_2d(dst_a, map_a, full, k, m_a);
                    tma_load_2d(dst_b, map_b, full, k, n_b);
                    tma_load_2d(dst_sfa, map_sfa, full, m, k_block);
                } else {  // parts of a unit may lie outside of D
                    if (rows_a > 0)
                        tma_load_2d_multicast(dst_a, map_a, full, k, m_a, peers_along_n);
                    if (rows_b > 0)
                        tma_load_2d_multicast(dst_b, map_b, full, k, n_b, peers_along_m);
                    if (rows_m > 0) tma_load_2d(dst_sfa, map_sfa, full, m, k_block);
                }
            }
            __syncwarp();
            pipeline.advance();
        }
    }
    griddepcontrol_launch_dependents();
}

// Producer, second warp: adds the scales of B to each stage. They are too few and too unaligned for
// TMA. Lane i holds those of every 32nd k-block, so that one coalesced load serves 32 stages.
template <class Config>
DEVICE void load_weight_scales(const fp8_gemm_1d2d_args& args, SharedStorage<Config>& storage,
                               DenseScheduler<Config> scheduler) {
    constexpr int COUNT = SharedStorage<Config>::NUM_SFB;
    const uint32_t lane_idx = threadIdx.x % 32, last_row = (args.shape_n - 1) / 128;
    Pipeline<Config::NUM_STAGES> pipeline(storage.full_barriers, storage.empty_barriers);

    for (Tile tile; scheduler.next(tile);) {
        const uint32_t row = tile.n_block_idx * Config::BLOCK_N / 128;
        const float* sfb[COUNT];  // of columns past the last row, which do not exist: any scale
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            sfb[i] = args.sfb + int64_t{min(row + i, last_row)} * args.sfb_stride_n;
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

// A consumer warpgroup: 64-row waves of the tile, from shared memory to D.
template <class Config>
struct Consumer {
    static constexpr int CLUSTER = SharedStorage<Config>::CLUSTER;
    static constexpr int NUM_SFB = SharedStorage<Config>::NUM_SFB;
    static constexpr int WAVES = Config::BLOCK_M / WGMMA_M / Config::NUM_CONSUMERS;
    static_assert(WAVES * WGMMA_M * Config::NUM_CONSUMERS == Config::BLOCK_M,
                  "waves fill the tile");
    static_assert(1 <= Config::NUM_PARTIALS && Config::NUM_PARTIALS <= 4, "wgmma_wait_group");
    static_assert((Config::NUM_PARTIALS + WAVES - 1) / WAVES <= Config::NUM_STAGES,
                  "a warpgroup holds that many stages before it releases one");

    uint32_t warp_idx, lane_idx, first_row;  // first row of this warpgroup in the tile
    uint32_t desc_a, desc_b;  // low words of the descriptors of this warpgroup's A and of B
    uint32_t smem_sfa, smem_sfb;
    Pipeline<Config::NUM_STAGES> pipeline;

    DEVICE Consumer(const SharedStorage<Config>& storage, uint32_t warpgroup_idx)
        : warp_idx(__shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0)),
          lane_idx(threadIdx.x % 32),
          first_row(warpgroup_idx * WAVES * WGMMA_M),
          desc_a(wgmma_descriptor_low(shared_address(storage.a) + first_row * BLOCK_K)),
          desc_b(wgmma_descriptor_low(shared_address(storage.b))),
          smem_sfa(shared_address(storage.sfa) +
                   (first_row + warp_idx % 4 * WARP_M + lane_idx / 4) * 4),
          smem_sfb(shared_address(storage.sfb)),
          pipeline(storage.full_barriers, storage.empty_barriers) {
        // NOTES: without this the compiler recomputes them from the aligned base in the main loop.
        pin(desc_a), pin(desc_b), pin(smem_sfa), pin(smem_sfb);
    }

    // A stage that is full, and the scales of this thread's rows and of the columns in it.
    struct Stage {
        uint32_t idx;
        float scale_a[WAVES][2], scale_b[NUM_SFB];
    };

    DEVICE Stage acquire() {
        Stage stage;
        pipeline.wait_full();
        stage.idx = pipeline.stage_idx;
        pipeline.advance();
        return stage;
    }

    DEVICE void read_scale_a(Stage& stage) const {
#pragma unroll
        for (int r = 0; r < WAVES * 2; ++r)
            stage.scale_a[r / 2][r % 2] = ld_shared_f32(
                smem_sfa + (stage.idx * Config::BLOCK_M + r / 2 * WGMMA_M + r % 2 * 8) * 4);
    }

    DEVICE void read_scale_b(Stage& stage) const {
#pragma unroll
        for (int i = 0; i < NUM_SFB; ++i)
            stage.scale_b[i] = ld_shared_f32(smem_sfb + (stage.idx * 2 + i) * 4);
    }

    // The stage may be refilled: lane r of each warp tells CTA r, whose multicast also writes here.
    DEVICE void release(const Stage& stage) const {
        const uint32_t empty = pipeline.empty_barriers + stage.idx * 8;
        if constexpr (CLUSTER == 1) {
            if (lane_idx == 0) mbarrier_arrive(empty);
        } else {
            if (lane_idx < CLUSTER) mbarrier_arrive_cluster(empty, lane_idx);
        }
    }

    // First level: 128 channels of one wave in the tensor core.
    DEVICE void issue(float (&partial)[Config::BLOCK_N / 2], const Stage& stage, int wave) const {
        const uint32_t a = desc_a + (stage.idx * Config::BLOCK_M + wave * WGMMA_M) * (BLOCK_K / 16);
        const uint32_t b = desc_b + stage.idx * Config::BLOCK_N * (BLOCK_K / 16);
        fence_registers(partial);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_K / WGMMA_K; ++k)
            Wgmma<Config::BLOCK_N>::mma(partial, wgmma_descriptor(a + k * (WGMMA_K / 16)),
                                        wgmma_descriptor(b + k * (WGMMA_K / 16)), k > 0);
        wgmma_commit_group();
    }

    // Second level: float32 on the CUDA cores.
    DEVICE void promote_wave(float (&accum)[Config::BLOCK_N / 2],
                             float (&partial)[Config::BLOCK_N / 2], const Stage& stage, int wave,
                             uint32_t first_columns) const {
        fence_registers(partial);
        float scale[NUM_SFB][2];
#pragma unroll
        for (int r = 0; r < NUM_SFB * 2; ++r)
            scale[r / 2][r % 2] = stage.scale_a[wave][r % 2] * stage.scale_b[r / 2];
        promote<Config>(accum, partial, scale, first_columns);
    }

    // Adds `count` k-blocks to `accum`, one at a time: the waves of a k-block are jobs in a row, of
    // which IN_FLIGHT are in the tensor core, and while one is promoted the next ones, and those of
    // the other warpgroups, keep it busy.
    // NOTES: when the scales are read decides where the compiler puts the wait for them. With one or
    // two warpgroups it is best before the wgmmas; with three, whose tensor cores never idle, their
    // product has to wait until after them (measured: 3 % to 8 % each way).
    DEVICE void accumulate(float (&accum)[WAVES][Config::BLOCK_N / 2], uint32_t count,
                           uint32_t first_columns) {
        constexpr int IN_FLIGHT = Config::NUM_PARTIALS < WAVES ? Config::NUM_PARTIALS : WAVES;
        constexpr bool SCALES_FIRST = Config::NUM_CONSUMERS < 3;
        float partial[IN_FLIGHT][Config::BLOCK_N / 2];
        for (; count > 0; --count) {
            Stage stage = acquire();
            if constexpr (SCALES_FIRST) read_scale_a(stage), read_scale_b(stage);
#pragma unroll
            for (int wave = 0; wave < IN_FLIGHT; ++wave) issue(partial[wave], stage, wave);
            if constexpr (!SCALES_FIRST) read_scale_a(stage);
#pragma unroll
            for (int wave = 0; wave < WAVES; ++wave) {
                wgmma_wait_group(min(IN_FLIGHT, WAVES - wave) - 1);
                if constexpr (!SCALES_FIRST)
                    if (wave == 0) read_scale_b(stage);
                if (wave == WAVES - 1) release(stage);
                promote_wave(accum[wave], partial[wave % IN_FLIGHT], stage, wave, first_columns);
                if (wave + IN_FLIGHT < WAVES)
                    issue(partial[wave % IN_FLIGHT], stage, wave + IN_FLIGHT);
            }
        }
    }

    // The same for small tiles, NUM_PARTIALS k-blocks at a time: these are bound by the latency from
    // a full stage to its sum, so several are in flight. Returns how many k-blocks it added.
    DEVICE uint32_t accumulate_groups(float (&accum)[WAVES][Config::BLOCK_N / 2], uint32_t count,
                                      uint32_t first_columns) {
        constexpr int IN_FLIGHT = Config::NUM_PARTIALS;
        float partial[IN_FLIGHT][Config::BLOCK_N / 2];
        Stage stage[IN_FLIGHT];
        uint32_t step = 0;
        for (; step + IN_FLIGHT <= count; step += IN_FLIGHT) {
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                stage[i] = acquire();
                read_scale_a(stage[i]), read_scale_b(stage[i]);
                issue(partial[i], stage[i], 0);
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                wgmma_wait_group(IN_FLIGHT - 1 - i);
                release(stage[i]);
                promote_wave(accum[0], partial[i], stage[i], 0, first_columns);
            }
        }
        return step;
    }
};

template <class Config>
DEVICE void compute_tiles(const fp8_gemm_1d2d_args& args, SharedStorage<Config>& storage,
                          DenseScheduler<Config> scheduler, uint32_t warpgroup_idx) {
    constexpr int WAVES = Consumer<Config>::WAVES;
    Consumer<Config> consumer(storage, warpgroup_idx);
    Epilogue<Config> epilogue{shared_address(storage.d[consumer.warp_idx])};

    for (Tile tile; scheduler.next(tile);) {
        const uint32_t n = tile.n_block_idx * Config::BLOCK_N;
        const uint32_t m = tile.m_block_idx * Config::BLOCK_M + consumer.first_row +
                           consumer.warp_idx % 4 * WARP_M;
        const uint32_t first_columns = 128 - n % 128;
        float accum[WAVES][Config::BLOCK_N / 2] = {};
        uint32_t count = tile.k_block_end - tile.k_block_begin;
        if constexpr (WAVES == 1 && Config::NUM_PARTIALS > 1)
            count -= consumer.accumulate_groups(accum, count, first_columns);
        consumer.accumulate(accum, count, first_columns);
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave)
            epilogue.store(&args.tensor_map_d, accum[wave], m + wave * WGMMA_M, n);
    }
    epilogue.drain();
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
        prefetch_tensormap(&args.tensor_map_a[args.shape_m < Config::BLOCK_M / Config::CLUSTER_N]);
        prefetch_tensormap(&args.tensor_map_b[0]);
        prefetch_tensormap(&args.tensor_map_sfa[args.shape_m < Config::BLOCK_M]);
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

    // 3. The roles trade registers: 64K are there, 512 for each row of four warps.
    constexpr int PRODUCER_REGISTERS = Config::NUM_CONSUMERS == 3 ? 32 : 40;
    constexpr int CONSUMER_REGISTERS = Config::NUM_CONSUMERS == 3 ? 152 : 232;
    const DenseScheduler<Config> scheduler((args.shape_m + Config::BLOCK_M - 1) / Config::BLOCK_M,
                                           (args.shape_n + Config::BLOCK_N - 1) / Config::BLOCK_N,
                                           (args.shape_k + BLOCK_K - 1) / BLOCK_K, args.raster_m,
                                           blockIdx.x, gridDim.x);
    const uint32_t warpgroup_idx = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARPGROUP, 0);
    if (warpgroup_idx == Config::NUM_CONSUMERS) {
        if constexpr (Config::NUM_CONSUMERS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
        const uint32_t warp_idx = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32 % 4, 0);
        if (warp_idx == 0) load_tiles<Config>(args, storage, scheduler);
        if (warp_idx == 1) load_weight_scales<Config>(args, storage, scheduler);
    } else {
        if constexpr (Config::NUM_CONSUMERS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
        compute_tiles<Config>(args, storage, scheduler, warpgroup_idx);
    }

    // 4. No CTA leaves while a peer may still arrive at its barriers.
    if constexpr (SharedStorage<Config>::CLUSTER > 1) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    }
}
