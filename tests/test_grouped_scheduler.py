"""The grouped scheduler, compiled for the CPU: every row once, no tile beyond its group.

A warp is a `Lanes` of 32 values here; the functions are those of ptx/warp.cuh.
"""

import ctypes
import random
import shutil
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deep_gemm.jit.codegen import KERNELS

CONFIGS = [(64, 128, 1), (128, 64, 1), (192, 128, 2), (256, 128, 2)]  # BLOCK_M, BLOCK_N, CLUSTER_N
IDS, ENDS, COUNTS = range(3)  # GroupedRows::kind
WORDS = 24  # 6 of the tile, 16 of its masks, 1 of its CTA

HARNESS = """
#include <vector>
#include "scheduler.cuh"
template <class T> struct Lanes {
    T v[32];
    Lanes() = default;
    explicit Lanes(T x) { for (T& each : v) each = x; }
    template <class U> explicit Lanes(const Lanes<U>& x) {
        for (int i = 0; i < 32; ++i) v[i] = static_cast<T>(x.v[i]);
    }
};
template <class T> struct Same { using Type = T; };
#define OPERATOR(op, R)                                                                        \\
    template <class T> Lanes<R> operator op(const Lanes<T>& a, const Lanes<T>& b) {            \\
        Lanes<R> r;                                                                            \\
        for (int i = 0; i < 32; ++i) r.v[i] = a.v[i] op b.v[i];                                \\
        return r;                                                                              \\
    }                                                                                          \\
    template <class T> Lanes<R> operator op(const Lanes<T>& a, typename Same<T>::Type b) {     \\
        return a op Lanes<T>(b);                                                               \\
    }                                                                                          \\
    template <class T> Lanes<R> operator op(typename Same<T>::Type a, const Lanes<T>& b) {     \\
        return Lanes<T>(a) op b;                                                               \\
    }
OPERATOR(+, T) OPERATOR(-, T) OPERATOR(*, T) OPERATOR(/, T) OPERATOR(&, T) OPERATOR(|, T)
OPERATOR(>>, T) OPERATOR(<, bool) OPERATOR(>, bool) OPERATOR(>=, bool) OPERATOR(==, bool)
OPERATOR(!=, bool)
inline Lanes<uint32_t> lane_index() {
    Lanes<uint32_t> r;
    for (int i = 0; i < 32; ++i) r.v[i] = i;
    return r;
}
inline bool is_first_lane() { return true; }
inline uint32_t vote(const Lanes<bool>& c) {
    uint32_t mask = 0;
    for (int i = 0; i < 32; ++i) mask |= static_cast<uint32_t>(c.v[i]) << i;
    return mask;
}
inline uint32_t broadcast(const Lanes<uint32_t>& x, uint32_t lane) { return x.v[lane]; }
inline Lanes<uint32_t> from_lane_before(const Lanes<uint32_t>& x) {
    Lanes<uint32_t> r = x;
    for (int i = 1; i < 32; ++i) r.v[i] = x.v[i - 1];
    return r;
}
inline Lanes<uint32_t> inclusive_sum(Lanes<uint32_t> x) {
    for (int i = 1; i < 32; ++i) x.v[i] += x.v[i - 1];
    return x;
}
template <class T>
Lanes<T> select(const Lanes<bool>& c, const Lanes<T>& yes, const Lanes<T>& no) {
    Lanes<T> r;
    for (int i = 0; i < 32; ++i) r.v[i] = c.v[i] ? yes.v[i] : no.v[i];
    return r;
}
static uint32_t layout_length, num_reads, is_outside;
inline Lanes<int32_t> load_if(const Lanes<bool>& c, const int32_t* values,
                              const Lanes<uint32_t>& index, int32_t otherwise) {
    Lanes<int32_t> r(otherwise);
    ++num_reads;
    for (int i = 0; i < 32; ++i) {
        if (!c.v[i]) continue;
        if (index.v[i] >= layout_length) { is_outside = 1; continue; }
        r.v[i] = values[index.v[i]];
    }
    return r;
}
inline Lanes<uint32_t> draw(uint32_t* counter) { return Lanes<uint32_t>((*counter)++); }
inline void reset(uint32_t* counter) { *counter = 0; }
inline uint32_t lowest_bit(uint32_t mask) { return __builtin_ctz(mask); }
inline Lanes<uint32_t> lowest_bit(const Lanes<uint32_t>& mask) {
    Lanes<uint32_t> r;
    for (int i = 0; i < 32; ++i) r.v[i] = mask.v[i] ? __builtin_ctz(mask.v[i]) : ~0u;
    return r;
}
inline uint32_t highest_bit(uint32_t mask) { return 31 - __builtin_clz(mask); }
inline uint32_t leading_ones(uint32_t mask) { return ~mask ? __builtin_ctz(~mask) : 32; }
#include "grouped_scheduler.cuh"

template <int M, int N, int C> struct Config {
    static constexpr int BLOCK_M = M, BLOCK_N = N, CLUSTER_M = 1, CLUSTER_N = C;
};
template <class Scheduler>
bool write_next(Scheduler& scheduler, uint32_t* o) {
    Tile tile;
    uint32_t masks[16] = {};
    if (!scheduler.next(tile, masks, masks + 8)) return false;
    o[0] = tile.m, o[1] = tile.n, o[2] = tile.rows, o[3] = tile.group_idx;
    o[4] = tile.k_block_begin, o[5] = tile.k_block_end;
    for (int i = 0; i < 16; ++i) o[6 + i] = masks[i];
    return true;
}
// Tiles of one CTA, WORDS numbers each; returns how many there are, ~0 after a read out of range.
template <int M, int N, int C>
uint32_t walk(const int32_t* layout, const uint32_t* p, uint32_t* out, uint32_t capacity) {
    layout_length = p[9], num_reads = 0, is_outside = 0;
    const GroupedRows rows{layout, p[0], p[1], p[2], p[3], p[4], nullptr};
    GroupedScheduler<Config<M, N, C>> scheduler(rows, p[5], 7, p[6], p[7], p[8]);
    uint32_t count = 0;
    for (; write_next(scheduler, out + 24 * count); ++count)
        if (count == capacity) return count + 1;
    return is_outside ? ~0u : count;
}
// The same for all CTAs, which draw their tiles, in an order that `seed` makes up: a number more
// each, the CTA's. ~0 also if the counter is not left as it was.
template <int M, int N, int C>
uint32_t draw_all(const int32_t* layout, const uint32_t* p, uint32_t* out, uint32_t capacity,
                  uint32_t seed) {
    layout_length = p[9], num_reads = 0, is_outside = 0;
    uint32_t next_unit = 0, count = 0;
    const GroupedRows rows{layout, p[0], p[1], p[2], p[3], p[4], &next_unit};
    std::vector<GroupedScheduler<Config<M, N, C>>> running;
    std::vector<uint32_t> cta;
    for (uint32_t i = 0; i < p[8]; ++i) {
        running.emplace_back(rows, p[5], 7, p[6], i, p[8]);
        cta.push_back(i);
    }
    while (!cta.empty()) {
        seed = seed * 1664525 + 1013904223;
        const uint32_t i = (seed >> 8) % cta.size(), at = cta[i];
        if (write_next(running[at], out + 24 * count)) {
            out[24 * count + 22] = at;
            if (++count == capacity) return count + 1;
        } else {
            cta.erase(cta.begin() + i);
        }
    }
    return is_outside || next_unit != 0 ? ~0u : count;
}
extern "C" uint32_t reads() { return num_reads; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed: the scheduler cannot be compiled for the CPU")
    folder = tmp_path_factory.mktemp("scheduler")
    functions = "".join(
        f'extern "C" uint32_t walk_{m}_{n}_{c}(const int32_t* layout, const uint32_t* p, '
        f"uint32_t* out, uint32_t capacity) {{ return walk<{m}, {n}, {c}>(layout, p, out, "
        f"capacity); }}\n"
        f'extern "C" uint32_t draw_{m}_{n}_{c}(const int32_t* layout, const uint32_t* p, '
        f"uint32_t* out, uint32_t capacity, uint32_t seed) {{ return draw_all<{m}, {n}, {c}>("
        f"layout, p, out, capacity, seed); }}\n"
        for m, n, c in CONFIGS
    )
    (folder / "harness.cpp").write_text(HARNESS + functions)
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Werror",
            "-Wno-unknown-pragmas",
            "-shared",
            "-fPIC",
            f"-I{KERNELS}",
        ]
        + ["harness.cpp", "-o", "harness.so"],
        cwd=folder,
        check=True,
    )
    return ctypes.CDLL(str(folder / "harness.so"))


class Layout:
    """Numbers on the device, and what they mean, found row by row."""

    def __init__(self, kind, values, num_groups, m, alignment=1, zero_padding=False):
        self.kind, self.values, self.num_groups = kind, list(values), num_groups
        self.m, self.alignment, self.zero_padding = m, alignment, zero_padding

    def rows(self):
        """{row: (group or None for padding that is written)}"""
        expected = {}
        if self.kind == COUNTS:
            for group, count in enumerate(self.values):
                for row in range(min(max(count, 0), self.m)):
                    expected[group * self.m + row] = group
            return expected
        owner = [None] * self.m
        if self.kind == ENDS:
            begin = 0
            for group, end in enumerate(self.values):
                end = min(max(end, 0), self.m)
                for row in range(begin, end):
                    owner[row] = group
                begin = -(-end // self.alignment) * self.alignment
        else:
            owner = [group if 0 <= group < self.num_groups else None for group in self.values]
        for begin in range(0, self.m, self.alignment):
            block = owner[begin : begin + self.alignment]
            group = next((each for each in block if each is not None), None)
            if group is None:
                continue
            for row, each in enumerate(block, begin):
                if each is not None:
                    expected[row] = group if self.kind == IDS else each
                elif self.zero_padding:
                    expected[row] = None
        return expected


def draw(library, config, layout, n, raster_m, num_ctas, seed, capacity):
    """Tiles of each CTA, drawn in some order."""
    parameters = (ctypes.c_uint32 * 10)(
        layout.kind, layout.num_groups, layout.m, layout.alignment, layout.zero_padding,
        n, raster_m, 0, num_ctas, len(layout.values),
    )  # fmt: skip
    values = (ctypes.c_int32 * max(1, len(layout.values)))(*layout.values)
    out = (ctypes.c_uint32 * (WORDS * capacity))()
    function = getattr(library, "draw_{}_{}_{}".format(*config))
    count = function(values, parameters, out, capacity, seed)
    assert count != 2**32 - 1, "read out of range, or the counter is not left at 0"
    assert count <= capacity, "there are more tiles than D has"
    walks = [[] for _ in range(num_ctas)]
    for i in range(count):
        walks[out[WORDS * i + 22]].append(tuple(out[WORDS * i : WORDS * i + 22]))
    return walks


def walk(library, config, layout, n, raster_m, cta_idx, num_ctas, capacity=200_000):
    parameters = (ctypes.c_uint32 * 10)(
        layout.kind, layout.num_groups, layout.m, layout.alignment, layout.zero_padding,
        n, raster_m, cta_idx, num_ctas, len(layout.values),
    )  # fmt: skip
    values = (ctypes.c_int32 * max(1, len(layout.values)))(*layout.values)
    out = (ctypes.c_uint32 * (WORDS * capacity))()
    count = getattr(library, "walk_{}_{}_{}".format(*config))(values, parameters, out, capacity)
    assert count != 2**32 - 1, "grouped_layout was read out of range"
    assert count <= capacity, "a CTA has more tiles than D"
    return [tuple(out[WORDS * i : WORDS * i + 22]) for i in range(count)]


def check(library, config, layout, n=200, raster_m=3, clusters=5, is_garbage=False, seed=0):
    """Walk with all CTAs and compare what each row gets with what `Layout.rows` says."""
    num_ctas = clusters * config[2]
    walks = [
        walk(library, config, layout, n, raster_m, cta, num_ctas, 4000) for cta in range(num_ctas)
    ]
    check_walks(walks, config, layout, n, is_garbage)
    if config[2] == 1:
        walks = draw(library, config, layout, n, raster_m, num_ctas, seed, 20_000)
        check_walks(walks, config, layout, n, is_garbage)


def check_walks(walks, config, layout, n, is_garbage):
    block_m, block_n, cluster = config
    total = layout.m * (layout.num_groups if layout.kind == COUNTS else 1)
    got = {}
    for tiles in walks:
        for m, column, rows, group, k_begin, k_end, *masks in tiles:
            valid = [i for i in range(block_m) if masks[i // 32] >> i % 32 & 1]
            stored = [i for i in range(block_m) if masks[8 + i // 32] >> i % 32 & 1]
            assert set(valid) <= set(stored)
            assert rows == (valid[-1] + 1 if valid else 0) <= block_m
            assert (k_begin, k_end) == (0, 7 if rows else 0)
            assert group < layout.num_groups and column % block_n == 0
            for i in stored:
                assert 0 <= m + i < total, "a row outside of D is written"
                if column < n:
                    got.setdefault((m + i, column), []).append(group if i in valid else None)
    for first in range(0, len(walks), cluster):
        unit = walks[first : first + cluster]
        assert len({len(tiles) for tiles in unit}) == 1, "CTAs of a cluster disagree"
        for tiles in zip(*unit, strict=True):
            for rank, tile in enumerate(tiles):
                assert tile[1] == tiles[0][1] + rank * block_n
                assert (tile[0], *tile[2:]) == (tiles[0][0], *tiles[0][2:])
    if is_garbage:  # what is written then is nobody's business, but it stays inside of D
        return
    assert all(len(each) == 1 for each in got.values()), "a row is written twice"
    columns = range(0, n, block_n)
    expected = {(row, n0): group for row, group in layout.rows().items() for n0 in columns}
    assert {key: each[0] for key, each in got.items()} == expected


def random_ids(rng, num_blocks, alignment, num_groups, m):
    """Sorted or not, runs of blocks of a group; -1 anywhere, whole blocks and tails of it."""
    ids = []
    group = rng.randrange(num_groups)
    for _ in range(num_blocks):
        if rng.random() < 0.4:
            group = rng.randrange(-1, num_groups)
        share = rng.choice([0, 0, 0.1, 0.9])
        ids += [-1 if rng.random() < share else group for _ in range(alignment)]
    return ids[:m]


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), config=st.sampled_from(CONFIGS))
def test_ids(library, seed, config):
    rng = random.Random(seed)
    alignment = rng.choice([16, 32, 64, 128, 48])
    num_blocks = rng.choice([1, 2, 5, 20, 33, 70])
    m = num_blocks * alignment - rng.choice([0, 0, 1, 15])
    num_groups = rng.choice([1, 3, 40])
    ids = random_ids(rng, num_blocks, alignment, num_groups, m)
    if rng.random() < 0.2:
        ids = [rng.choice([0, -1])] * m
    layout = Layout(IDS, ids, num_groups, m, alignment, rng.random() < 0.5)
    check(library, config, layout, clusters=rng.choice([1, 3, 7, 50]), seed=seed % 2**32)


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), config=st.sampled_from(CONFIGS))
def test_prefix_sums(library, seed, config):
    rng = random.Random(seed)
    alignment = rng.choice([1, 1, 8, 16, 128])
    ends, begin = [], 0
    for _ in range(rng.choice([1, 2, 31, 32, 33, 100])):
        end = begin + rng.choice([0, 0, 1, 7, 16, 63, 64, 65, 300])
        ends.append(end)
        begin = -(-end // alignment) * alignment
    m = max(1, ends[-1] + rng.choice([0, 5, 200]))
    layout = Layout(ENDS, ends, len(ends), m, alignment, rng.random() < 0.5)
    check(library, config, layout, clusters=rng.choice([1, 3, 7, 50]), seed=seed % 2**32)


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), config=st.sampled_from(CONFIGS))
def test_counts(library, seed, config):
    rng = random.Random(seed)
    m_max = rng.choice([1, 2, 31, 64, 65, 300])
    counts = [rng.choice([0, 0, 1, m_max // 2, m_max]) for _ in range(rng.choice([1, 5, 32, 90]))]
    layout = Layout(COUNTS, counts, len(counts), m_max)
    check(library, config, layout, clusters=rng.choice([1, 3, 7, 50]), seed=seed % 2**32)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from([IDS, ENDS, COUNTS]))
@example(seed=0, kind=IDS)
def test_garbage_stays_inside(library, seed, kind):
    rng = random.Random(seed)
    num_groups, m, alignment = rng.choice([1, 40]), rng.choice([1, 100, 400]), 16
    values = [
        rng.choice([-(2**31), -1, 0, 3, 50, m, m + 1, 2**31 - 1])
        for _ in range(m if kind == IDS else num_groups)
    ]
    layout = Layout(kind, values, num_groups, m, alignment, rng.random() < 0.5)
    check(library, rng.choice(CONFIGS), layout, is_garbage=kind == ENDS)


def test_empty_groups_cost_a_window_for_32(library):
    """Loads do not grow with the number of tiles, and with that of groups by one in 32."""
    layout = Layout(COUNTS, [0] * 511 + [4096], 512, 4096)
    tiles = walk(library, CONFIGS[0], layout, 1024, 4, 0, 132)
    assert len(tiles) in (64 * 8 // 132, -(-64 * 8 // 132))
    assert library.reads() == 512 // 32
    assert walk(library, CONFIGS[0], Layout(COUNTS, [0] * 512, 512, 4096), 1024, 4, 0, 132) == []


def test_a_dead_tail_of_ids_is_skipped_in_windows(library):
    layout = Layout(IDS, [0] * 128 + [-1] * 65_536, 1, 128 + 65_536, 128)
    assert len(walk(library, CONFIGS[0], layout, 128, 4, 0, 1)) == 2
    assert library.reads() < 17 * (1 + 128) + 16


def test_a_group_longer_than_a_window_is_one_segment(library):
    """Tiles of 192 rows fill a group of 100 blocks without a gap at the windows' ends."""
    layout = Layout(IDS, [0] * 12_800, 1, 12_800, 128)
    tiles = walk(library, CONFIGS[2], layout, 128, 16, 0, 2)
    assert [tile[2] for tile in tiles].count(192) == 66 and len(tiles) == 67
