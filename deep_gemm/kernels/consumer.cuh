// The consumer warpgroups: wgmma, promotion, epilogue.
#pragma once

#include "arguments.cuh"
#include "epilogue.cuh"
#include "pipeline.cuh"
#include "promote.cuh"
#include "ptx/wgmma.cuh"
#include "shared_storage.cuh"

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
                smem_sfa +
                (stage.idx * SharedStorage<Config>::SFA_STRIDE + r / 2 * WGMMA_M + r % 2 * 8) * 4);
    }

    DEVICE void read_scale_b(Stage& stage) const {
#pragma unroll
        for (int i = 0; i < NUM_SFB; ++i)
            stage.scale_b[i] = ld_shared_f32(smem_sfb + (stage.idx * 2 + i) * 4);
    }

    // The stage may be refilled: lane r of each warp tells CTA r, whose multicast also writes here.
    // NOTES: one lane speaks for its warp, so the others must have read their scales before. Without
    // the barrier they had not, once in thousands of tiles.
    DEVICE void release(const Stage& stage) const {
        __syncwarp();
        const uint32_t empty = pipeline.empty_barriers + stage.idx * 8;
        if constexpr (CLUSTER == 1) {
            if (lane_idx == 0) mbarrier_arrive(empty);
        } else {
            if (lane_idx < CLUSTER) mbarrier_arrive_cluster(empty, lane_idx);
        }
    }

    // Lets `count` stages pass that hold no row of this warpgroup.
    DEVICE void skip(uint32_t count) {
        for (; count > 0; --count) release(acquire());
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
    // two warpgroups it is best before the wgmmas; with three, whose tensor cores never idle, after
    // they are issued (measured: 3 % to 8 % each way).
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
            if constexpr (!SCALES_FIRST) read_scale_a(stage), read_scale_b(stage);
#pragma unroll
            for (int wave = 0; wave < WAVES; ++wave) {
                wgmma_wait_group(min(IN_FLIGHT, WAVES - wave) - 1);
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

template <class Config, class Tiles>
DEVICE void compute_tiles(const fp8_gemm_1d2d_args& args, SharedStorage<Config>& storage,
                          Tiles tiles, uint32_t warpgroup_idx) {
    constexpr int WAVES = Consumer<Config>::WAVES;
    Consumer<Config> consumer(storage, warpgroup_idx);
    Epilogue<Config> epilogue{shared_address(storage.d[consumer.warp_idx])};
    const uint32_t first_row = consumer.first_row + consumer.warp_idx % 4 * WARP_M;
    const uint32_t smem_sfa = consumer.smem_sfa;

    for (Tile tile; tiles.next(tile);) {
        const uint32_t first_columns = 128 - tile.n % 128;
        if constexpr (Config::IS_GROUPED) consumer.smem_sfa = smem_sfa + tile.sf_column % 4 * 4;
        float accum[WAVES][Config::BLOCK_N / 2] = {};
        uint32_t count = tile.k_block_end - tile.k_block_begin;
        if (Config::IS_GROUPED && tile.rows <= uniform(consumer.first_row)) {
            consumer.skip(count);
        } else {
            if constexpr (WAVES == 1 && Config::NUM_PARTIALS > 1)
                count -= consumer.accumulate_groups(accum, count, first_columns);
            consumer.accumulate(accum, count, first_columns);
        }
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave) {
            const uint32_t row = first_row + wave * WGMMA_M;
            if constexpr (Config::IS_GROUPED) {
                // NOTES: read again, rather than kept in registers all through the main loop.
                const TileSlot& slot = tiles.slot();
                const uint32_t m = slot.tile.m + row, n = slot.tile.n;
                const uint32_t stored = slot.stored[row / 32] >> row % 32 & ALL_ROWS;
                const uint32_t valid = slot.valid[row / 32] >> row % 32 & ALL_ROWS;
                if ((stored & valid) == ALL_ROWS) {
                    epilogue.store(&args.tensor_map_d, accum[wave], m, n);
                } else if (stored != 0) {
                    epilogue.store_rows(args, accum[wave], m, n, valid, stored);
                }
            } else {
                epilogue.store(&args.tensor_map_d, accum[wave], tile.m + row, tile.n);
            }
        }
    }
    epilogue.drain();
}
