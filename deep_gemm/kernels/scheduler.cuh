// Which tiles a cluster computes, in which order. Plain C++ but for the word DEVICE, so that
// tests/test_scheduler.py can compile it for the CPU and walk through it.
#pragma once

#include "ptx/types.cuh"

// A tile of D and the range of k-blocks to sum into it. It may hang over the edge of D.
struct Tile {
    uint32_t m, n;               // its first row in A and D, its first column in D
    uint32_t rows;               // of A that there are from m on, BLOCK_M at most
    uint32_t group_idx;          // whose weight it takes; 0 in a dense GEMM
    uint32_t sf_row, sf_column;  // of the scales of its first row: sf_row + k-block, sf_column
    uint32_t k_block_begin, k_block_end;
};

// How many of `count` rows from `first` on there are in a matrix of `total` rows.
DEVICE uint32_t rows_inside(uint32_t first, uint32_t count, uint32_t total) {
    const uint32_t rest = first < total ? total - first : 0;
    return rest < count ? rest : count;
}

// Units, of CLUSTER_M x CLUSTER_N tiles, of a matrix are visited in bands of `raster_m` units along
// M, M fastest: the clusters that run at one time then cover a rectangle of D, whose rows of A and B
// stay in L2. Finds the place of unit `unit_idx`.
DEVICE void place_unit(uint32_t unit_idx, uint32_t num_m_units, uint32_t num_n_units,
                       uint32_t raster_m, uint32_t& m_unit_idx, uint32_t& n_unit_idx) {
    const uint32_t band_units = raster_m * num_n_units;
    const uint32_t first_m = unit_idx / band_units * raster_m;
    const uint32_t in_band = unit_idx % band_units;
    const uint32_t band_height =
        num_m_units - first_m < raster_m ? num_m_units - first_m : raster_m;
    m_unit_idx = first_m + in_band % band_height;
    n_unit_idx = in_band / band_height;
}

// Place of a CTA in its cluster: CTA (m, n) has rank n * CLUSTER_M + m.
template <class Config>
struct ClusterRank {
    static constexpr uint32_t SIZE = Config::CLUSTER_M * Config::CLUSTER_N;
    uint32_t m, n;

    DEVICE explicit ClusterRank(uint32_t cta_idx)
        : m(cta_idx % SIZE % Config::CLUSTER_M), n(cta_idx % SIZE / Config::CLUSTER_M) {}
};

// Walks over the tiles of a dense D in steps of the number of clusters.
template <class Config>
struct DenseScheduler {
    uint32_t shape_m, num_m_units, num_n_units, num_k_blocks;
    uint32_t raster_m;               // height of a band, in units
    uint32_t unit_idx, unit_stride;  // next unit; number of clusters
    ClusterRank<Config> rank;

    DEVICE DenseScheduler(uint32_t shape_m, uint32_t shape_n, uint32_t num_k_blocks,
                          uint32_t raster_m, uint32_t cta_idx, uint32_t num_ctas)
        : shape_m(shape_m), num_k_blocks(num_k_blocks), raster_m(raster_m), rank(cta_idx) {
        constexpr uint32_t UNIT_M = Config::BLOCK_M * Config::CLUSTER_M;
        constexpr uint32_t UNIT_N = Config::BLOCK_N * Config::CLUSTER_N;
        num_m_units = (shape_m + UNIT_M - 1) / UNIT_M;
        num_n_units = (shape_n + UNIT_N - 1) / UNIT_N;
        unit_idx = cta_idx / ClusterRank<Config>::SIZE;
        unit_stride = num_ctas / ClusterRank<Config>::SIZE;
    }

    // Moves on to this CTA's next tile; false when there is none.
    DEVICE bool next(Tile& tile) {
        if (unit_idx >= num_m_units * num_n_units) return false;
        uint32_t m_unit_idx, n_unit_idx;
        place_unit(unit_idx, num_m_units, num_n_units, raster_m, m_unit_idx, n_unit_idx);
        tile.m = (m_unit_idx * Config::CLUSTER_M + rank.m) * Config::BLOCK_M;
        tile.n = (n_unit_idx * Config::CLUSTER_N + rank.n) * Config::BLOCK_N;
        tile.rows = rows_inside(tile.m, Config::BLOCK_M, shape_m);
        tile.group_idx = 0;
        tile.sf_row = 0;
        tile.sf_column = tile.m;
        tile.k_block_begin = 0;
        tile.k_block_end = num_k_blocks;
        unit_idx += unit_stride;
        return true;
    }
};
