// Which tiles a cluster computes where rows of A belong to groups, each with a weight of its own. How
// many rows a group has is known on the device only. Plain C++ over the functions of ptx/warp.cuh:
// tests/test_grouped_scheduler.py brings others for the CPU.
#pragma once

#include "scheduler.cuh"
#ifdef __CUDACC__
#include "ptx/warp.cuh"
#endif

// What GroupedRows::grouped_layout holds.
constexpr uint32_t ROW_GROUPS = 0;    // "contiguous": the group of each row, -1 in padding
constexpr uint32_t GROUP_ENDS = 1;    // "psum": the row that each group ends before
constexpr uint32_t GROUP_COUNTS = 2;  // "masked": how many of the shape_m rows each group uses

// Which rows of A and D belong to which group; part of a grouped kernel's arguments.
struct GroupedRows {
    const int32_t* grouped_layout;
    uint32_t kind;          // of grouped_layout
    uint32_t num_groups;    // weights
    uint32_t shape_m;       // rows of A and D; GROUP_COUNTS: those of one group
    uint32_t alignment;     // groups begin at multiples of it; unused by GROUP_COUNTS
    uint32_t zero_padding;  // write zeros to the padding of blocks that have rows of a group
    uint32_t* next_unit;    // how many units were drawn: 0 before and after a launch; or null
};

// A segment is a range of rows of one group: a whole group, or a run of blocks with the same group.
// The warp looks at a window of up to 32 of them, one in each lane. A prefix sum over their units
// tells where a unit lies, so that empty groups cost nothing but their part of a window.
//
// The order is that of the segments; within one it is the order of a dense GEMM. A unit lies within
// one segment, so the CTAs of a cluster always work for the same group.
template <class Config>
struct GroupedScheduler {
    static_assert(Config::CLUSTER_M == 1, "the CTAs of a cluster share the rows of A");
    static constexpr uint32_t NUM_MASKS = Config::BLOCK_M / 32;  // words of a bit for each row
    static constexpr int32_t NO_GROUP = -1, NO_BLOCK = -2;

    const GroupedRows& rows;
    uint32_t num_n_units, num_k_blocks, raster_m;
    uint32_t num_clusters, unit_idx, rank_n;  // unit_idx: this cluster's next unit

    bool has_unit = false;  // its first, which is not drawn

    uint32_t position = 0;  // the group, or block of rows, that the next window begins with
    uint32_t window_begin = 0, window_units = 0;  // units before the window, and in it
    Lanes<uint32_t> first_row;                    // of each segment
    Lanes<uint32_t> num_rows;                     // that are written; 0: no segment
    Lanes<uint32_t> valid_rows;                   // the first of these have a group
    Lanes<uint32_t> group_idx;
    Lanes<uint32_t> units_until;  // units of the window up to and including this segment

    DEVICE GroupedScheduler(const GroupedRows& rows, uint32_t shape_n, uint32_t num_k_blocks,
                            uint32_t raster_m, uint32_t cta_idx, uint32_t num_ctas)
        : rows(rows), num_k_blocks(num_k_blocks), raster_m(raster_m) {
        constexpr uint32_t UNIT_N = Config::BLOCK_N * Config::CLUSTER_N;
        num_n_units = (shape_n + UNIT_N - 1) / UNIT_N;
        num_clusters = num_ctas / ClusterRank<Config>::SIZE;
        unit_idx = cta_idx / ClusterRank<Config>::SIZE;
        rank_n = ClusterRank<Config>(cta_idx).n;
    }

    // Moves on to this CTA's next tile; false when there is none. Row i of the tile is computed where
    // bit i of `valid` is set (bit i % 32 of word i / 32), and written where that of `stored` is.
    // `tile.rows` ends with the last valid row; without one there is nothing to sum.
    DEVICE bool next(Tile& tile, uint32_t* valid, uint32_t* stored) {
        if (is_drawing() && has_unit) unit_idx = num_clusters + broadcast(draw(rows.next_unit), 0);
        while (unit_idx - window_begin >= window_units) {
            if (position >= num_positions()) {
                if (is_drawing() && has_unit) end_drawing();
                return false;
            }
            window_begin += window_units;
            load_window();
        }
        has_unit = true;
        const uint32_t unit = unit_idx - window_begin;
        const uint32_t segment = lowest_bit(vote(units_until > unit));
        const uint32_t segment_rows = broadcast(num_rows, segment);
        const uint32_t num_m_units = m_units(segment_rows);
        const uint32_t first_unit = broadcast(units_until, segment) - num_m_units * num_n_units;
        uint32_t m_unit_idx, n_unit_idx;
        place_unit(unit - first_unit, num_m_units, num_n_units, raster_m, m_unit_idx, n_unit_idx);
        const uint32_t first = m_unit_idx * Config::BLOCK_M;  // row in the segment
        tile.m = broadcast(first_row, segment) + first;
        tile.n = (n_unit_idx * Config::CLUSTER_N + rank_n) * Config::BLOCK_N;
        tile.group_idx = broadcast(group_idx, segment);
        tile.rows =
            mask_rows(tile.m, first, segment_rows, broadcast(valid_rows, segment), valid, stored);
        const bool has_groups = rows.kind == GROUP_COUNTS;  // of scales
        tile.sf_row = has_groups ? tile.group_idx * num_k_blocks : 0;
        tile.sf_column = has_groups ? first : tile.m;
        tile.k_block_begin = 0;
        tile.k_block_end = tile.rows > 0 ? num_k_blocks : 0;
        if (!is_drawing()) next_wave();
        return true;
    }

    // Units are drawn: each cluster begins with its own, and takes the next one that is left whenever
    // it has room for another. So nobody waits long for those with more to do, and what runs at one
    // time stays together, which L2 likes.
    DEVICE bool is_drawing() const {
        return ClusterRank<Config>::SIZE == 1 && rows.next_unit != nullptr;
    }

    // There are as many draws as units: one for each unit but the first of each cluster, and one in
    // vain for each cluster. The last one leaves the counter as it was.
    DEVICE void end_drawing() const {
        if (unit_idx - num_clusters == window_begin + window_units - 1) reset(rows.next_unit);
    }

    // Else each wave has a unit for every cluster. Places rotate from wave to wave, by a step that has
    // little in common with anything: units that end early often come at regular distances, and would
    // all fall to the same clusters.
    DEVICE void next_wave() {
        const uint32_t place = unit_idx % num_clusters;
        unit_idx += num_clusters - place + (place + (num_clusters * 5 / 8 | 1)) % num_clusters;
    }

    // Groups or blocks of rows, whichever the windows go over.
    DEVICE uint32_t num_positions() const {
        if (rows.kind != ROW_GROUPS) return rows.num_groups;
        return (rows.shape_m + rows.alignment - 1) / rows.alignment;
    }

    template <class T>  // a number, or one in each lane
    DEVICE static T m_units(T num_rows) {
        return (num_rows + (Config::BLOCK_M - 1)) / Config::BLOCK_M;
    }

    DEVICE void load_window() {
        if (rows.kind == ROW_GROUPS) {
            load_runs();
        } else {
            load_groups();
        }
        units_until = inclusive_sum(m_units(num_rows) * num_n_units);
        window_units = broadcast(units_until, 31);
    }

    // Segments are groups. Whatever the numbers are, no row outside of A and D is touched.
    DEVICE void load_groups() {
        group_idx = position + lane_index();
        const Lanes<bool> is_group = group_idx < rows.num_groups;
        const Lanes<uint32_t> end = load_count(is_group, group_idx);
        if (rows.kind == GROUP_COUNTS) {
            first_row = group_idx * rows.shape_m;
            valid_rows = end;
            num_rows = end;
        } else {
            first_row = aligned(load_count(is_group & (group_idx > 0u), group_idx - 1u));
            valid_rows = select(end > first_row, end - first_row, Lanes<uint32_t>(0u));
            const Lanes<uint32_t> padded =
                smaller(aligned(end), Lanes<uint32_t>(rows.shape_m)) - first_row;
            num_rows = select((valid_rows > 0u) & (rows.zero_padding != 0), padded, valid_rows);
        }
        position += 32;
    }

    // Segments are runs of blocks of the same group. A run may go on in the next window; unless it
    // fills this one, it is left for the next.
    DEVICE void load_runs() {
        const Lanes<uint32_t> lane_idx = lane_index();
        const Lanes<int32_t> group = block_group(position + lane_idx);
        const Lanes<uint32_t> before = from_lane_before(Lanes<uint32_t>(group));
        const uint32_t begins = vote((lane_idx == 0u) | (Lanes<uint32_t>(group) != before));
        const Lanes<uint32_t> later = Lanes<uint32_t>(begins) >> lane_idx >> 1u;
        Lanes<uint32_t> num_blocks = select(later > 0u, lowest_bit(later) + 1u, 32u - lane_idx);
        uint32_t used = highest_bit(begins);
        if (used == 0) {
            uint32_t more;
            used = 32;
            do {
                const Lanes<int32_t> next = block_group(position + used + lane_idx);
                const uint32_t first = broadcast(Lanes<uint32_t>(group), 0);
                more = leading_ones(vote(Lanes<uint32_t>(next) == Lanes<uint32_t>(first)));
                used += more;
            } while (more == 32);
            num_blocks = Lanes<uint32_t>(used);
        }
        const Lanes<bool> is_run =
            ((Lanes<uint32_t>(begins) >> lane_idx & 1u) != 0u) & (lane_idx < used) & (group >= 0);
        group_idx = Lanes<uint32_t>(group);
        first_row = (position + lane_idx) * rows.alignment;
        num_rows = select(is_run, smaller(num_blocks * rows.alignment, rows.shape_m - first_row),
                          Lanes<uint32_t>(0u));
        valid_rows = num_rows;
        position += used;
    }

    // The group of a block of rows: that of its first valid row.
    DEVICE Lanes<int32_t> block_group(Lanes<uint32_t> block_idx) const {
        constexpr int AT_ONCE = 4;  // loads in flight
        const Lanes<uint32_t> begin = block_idx * rows.alignment;
        const Lanes<bool> is_block = begin < rows.shape_m;
        Lanes<int32_t> group = row_group(is_block, begin);
        for (uint32_t i = 1; i < rows.alignment; i += AT_ONCE) {
            const Lanes<bool> is_open = is_block & (group < 0);
            if (vote(is_open) == 0) break;
            Lanes<int32_t> found[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                found[j] = row_group(is_open & (begin + (i + j) < rows.shape_m) &
                                         (Lanes<uint32_t>(i + j) < rows.alignment),
                                     begin + (i + j));
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) group = select(group < 0, found[j], group);
        }
        return select(is_block, group, Lanes<int32_t>(NO_BLOCK));
    }

    DEVICE Lanes<int32_t> row_group(Lanes<bool> condition, Lanes<uint32_t> row) const {
        const Lanes<int32_t> group = load_if(condition, rows.grouped_layout, row, NO_GROUP);
        return select(Lanes<uint32_t>(group) < rows.num_groups, group, Lanes<int32_t>(NO_GROUP));
    }

    // An end or a count, not below 0 and not beyond the rows that there are.
    DEVICE Lanes<uint32_t> load_count(Lanes<bool> condition, Lanes<uint32_t> index) const {
        const Lanes<int32_t> count = load_if(condition, rows.grouped_layout, index, 0);
        return smaller(Lanes<uint32_t>(select(count > 0, count, Lanes<int32_t>(0))),
                       Lanes<uint32_t>(rows.shape_m));
    }

    DEVICE Lanes<uint32_t> aligned(Lanes<uint32_t> row) const {
        return (row + (rows.alignment - 1)) / rows.alignment * rows.alignment;
    }

    DEVICE static Lanes<uint32_t> smaller(Lanes<uint32_t> a, Lanes<uint32_t> b) {
        return select(a < b, a, b);
    }

    // The two masks of a tile at row `m`, which is row `first` of its segment; returns `Tile::rows`.
    DEVICE uint32_t mask_rows(uint32_t m, uint32_t first, uint32_t segment_rows,
                              uint32_t segment_valid, uint32_t* valid, uint32_t* stored) const {
        Lanes<int32_t> group[NUM_MASKS];
        if (rows.kind == ROW_GROUPS) {
#pragma unroll
            for (uint32_t i = 0; i < NUM_MASKS; ++i) {  // all loads in flight
                const Lanes<uint32_t> row = i * 32 + lane_index();
                group[i] = row_group(row + first < segment_rows, row + m);
            }
        }
        uint32_t rows_until = 0;
#pragma unroll
        for (uint32_t i = 0; i < NUM_MASKS; ++i) {
            const Lanes<uint32_t> row = i * 32 + lane_index() + first;
            const uint32_t valid_mask =
                vote(rows.kind == ROW_GROUPS ? group[i] >= 0 : row < segment_valid);
            const uint32_t inside_mask = vote(row < segment_rows);
            if (is_first_lane()) {
                valid[i] = valid_mask;
                stored[i] = rows.zero_padding ? inside_mask : valid_mask;
            }
            if (valid_mask != 0) rows_until = i * 32 + highest_bit(valid_mask) + 1;
        }
        return rows_until;
    }
};
