// Which tiles a cluster computes, in which order. Plain C++ but for the word DEVICE, so that
// tests/test_scheduler.py can compile it for the CPU and walk through it.
#pragma once

#include "ptx/types.cuh"

// A tile of D and the range of k-blocks to sum into it.
struct Tile {
    uint32_t m_block_idx;
    uint32_t n_block_idx;
    uint32_t k_block_begin;
    uint32_t k_block_end;
};

// Walks over the tiles of a dense D in steps of the number of clusters. The CTAs of a cluster get
// adjacent tiles: CLUSTER_M x CLUSTER_N of them form one unit of the walk, and a unit may hang over
// the edge of D (nothing is loaded or stored there).
//
// Units are visited in bands of `raster_m` units along M, M fastest: the clusters that run at one
// time then cover a rectangle of D, whose rows of A and B stay in L2.
template <class Config>
struct DenseScheduler {
    uint32_t num_m_units, num_n_units, num_k_blocks;
    uint32_t raster_m;               // height of a band, in units
    uint32_t unit_idx, unit_stride;  // next unit; number of clusters
    uint32_t rank_m, rank_n;         // place of this CTA in its unit

    DEVICE DenseScheduler(uint32_t num_m_blocks, uint32_t num_n_blocks, uint32_t num_k_blocks,
                          uint32_t raster_m, uint32_t cta_idx, uint32_t num_ctas)
        : num_m_units((num_m_blocks + Config::CLUSTER_M - 1) / Config::CLUSTER_M),
          num_n_units((num_n_blocks + Config::CLUSTER_N - 1) / Config::CLUSTER_N),
          num_k_blocks(num_k_blocks),
          raster_m(raster_m) {
        constexpr uint32_t CLUSTER = Config::CLUSTER_M * Config::CLUSTER_N;
        unit_idx = cta_idx / CLUSTER;
        unit_stride = num_ctas / CLUSTER;
        rank_m = cta_idx % CLUSTER % Config::CLUSTER_M;
        rank_n = cta_idx % CLUSTER / Config::CLUSTER_M;
    }

    // Moves on to this CTA's next tile; false when there is none.
    DEVICE bool next(Tile& tile) {
        if (unit_idx >= num_m_units * num_n_units) return false;
        const uint32_t band_units = raster_m * num_n_units;
        const uint32_t first_m = unit_idx / band_units * raster_m;
        const uint32_t in_band = unit_idx % band_units;
        const uint32_t band_height =
            num_m_units - first_m < raster_m ? num_m_units - first_m : raster_m;
        tile.m_block_idx = (first_m + in_band % band_height) * Config::CLUSTER_M + rank_m;
        tile.n_block_idx = in_band / band_height * Config::CLUSTER_N + rank_n;
        tile.k_block_begin = 0;
        tile.k_block_end = num_k_blocks;
        unit_idx += unit_stride;
        return true;
    }
};
