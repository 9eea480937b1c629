"""The dense scheduler, compiled for the CPU: every tile once, clusters stay together."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import deep_gemm

KERNELS = Path(deep_gemm.__file__).parent / "kernels"
CLUSTERS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]
BLOCK_M, BLOCK_N = 192, 48

HARNESS = """
#include "scheduler.cuh"
template <int M, int N> struct Config {
    static constexpr int BLOCK_M = TILE_M, BLOCK_N = TILE_N, CLUSTER_M = M, CLUSTER_N = N;
};
// Writes the tiles of one CTA as eight numbers each; returns how many there are.
template <int M, int N> uint32_t walk(const uint32_t* p, uint32_t* out, uint32_t capacity) {
    DenseScheduler<Config<M, N>> scheduler(p[0], p[1], p[2], p[3], p[4], p[5]);
    uint32_t count = 0;
    for (Tile tile; scheduler.next(tile); ++count) {
        if (count == capacity) return count + 1;
        uint32_t* o = out + 8 * count;
        o[0] = tile.m, o[1] = tile.n, o[2] = tile.rows, o[3] = tile.group_idx;
        o[4] = tile.sf_row, o[5] = tile.sf_column;
        o[6] = tile.k_block_begin, o[7] = tile.k_block_end;
    }
    return count;
}
"""


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed: the scheduler cannot be compiled for the CPU")
    folder = tmp_path_factory.mktemp("scheduler")
    functions = "".join(
        f'extern "C" uint32_t walk_{m}_{n}(const uint32_t* p, uint32_t* out, uint32_t capacity)'
        f" {{ return walk<{m}, {n}>(p, out, capacity); }}\n"
        for m, n in CLUSTERS
    )
    (folder / "harness.cpp").write_text(HARNESS + functions)
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-Wall", "-shared", "-fPIC", f"-I{KERNELS}"]
        + [f"-DTILE_M={BLOCK_M}", f"-DTILE_N={BLOCK_N}", "harness.cpp", "-o", "harness.so"],
        cwd=folder,
        check=True,
    )
    library = ctypes.CDLL(str(folder / "harness.so"))

    def tiles_of(cluster, m, n, k_blocks, raster_m, cta_idx, num_ctas):
        capacity = -(-m // BLOCK_M) * -(-n // BLOCK_N) + 1
        parameters = (ctypes.c_uint32 * 6)(m, n, k_blocks, raster_m, cta_idx, num_ctas)
        out = (ctypes.c_uint32 * (8 * capacity))()
        count = getattr(library, f"walk_{cluster[0]}_{cluster[1]}")(parameters, out, capacity)
        assert count <= capacity, "a CTA has more tiles than D"
        return [Tile(*out[8 * i : 8 * i + 8]) for i in range(count)]

    return tiles_of


class Tile(NamedTuple):
    """`struct Tile` of scheduler.cuh."""

    m: int
    n: int
    rows: int
    group_idx: int
    sf_row: int
    sf_column: int
    k_block_begin: int
    k_block_end: int


@given(
    cluster=st.sampled_from(CLUSTERS),
    m=st.integers(1, 70 * BLOCK_M),
    n=st.integers(1, 40 * BLOCK_N // 8).map(lambda x: 8 * x),
    k_blocks=st.integers(1, 200),
    raster_m=st.integers(1, 20),
    clusters=st.integers(1, 132),
)
@example(cluster=(2, 1), m=2 * BLOCK_M + 1, n=43 * BLOCK_N, k_blocks=2, raster_m=8, clusters=66)
@example(cluster=(1, 2), m=11 * BLOCK_M, n=10 * BLOCK_N + 8, k_blocks=3, raster_m=16, clusters=66)
@example(cluster=(2, 2), m=1, n=8, k_blocks=1, raster_m=1, clusters=132)
def test_every_tile_once_and_clusters_stay_together(
    walk, cluster, m, n, k_blocks, raster_m, clusters
):
    size = cluster[0] * cluster[1]
    walks = [
        walk(cluster, m, n, k_blocks, raster_m, cta, clusters * size)
        for cta in range(clusters * size)
    ]
    inside = [(t.m, t.n) for tiles in walks for t in tiles if t.m < m and t.n < n]
    expected = {(row, column) for row in range(0, m, BLOCK_M) for column in range(0, n, BLOCK_N)}
    assert len(inside) == len(expected) and set(inside) == expected
    for tile in (tile for tiles in walks for tile in tiles):
        assert tile.rows == max(0, min(BLOCK_M, m - tile.m))  # parts of a unit may be outside
        assert (tile.group_idx, tile.sf_row, tile.sf_column) == (0, 0, tile.m)
        assert (tile.k_block_begin, tile.k_block_end) == (0, k_blocks)
    for first in range(0, clusters * size, size):
        unit = walks[first : first + size]
        assert len({len(tiles) for tiles in unit}) == 1, "CTAs of a cluster disagree on their tiles"
        for tiles in zip(*unit, strict=True):
            places = [
                (
                    tiles[0].m + rank % cluster[0] * BLOCK_M,
                    tiles[0].n + rank // cluster[0] * BLOCK_N,
                )
                for rank in range(size)
            ]
            assert [(tile.m, tile.n) for tile in tiles] == places


def test_the_clusters_of_one_wave_cover_a_compact_rectangle(walk):
    """132 CTAs side by side read few rows of A and B: that is what the raster bands are for."""
    sizes = 64 * BLOCK_M, 64 * BLOCK_N
    wave = [walk((1, 1), *sizes, 1, 16, cta, 132)[0] for cta in range(132)]
    assert len({tile.m for tile in wave}) + len({tile.n for tile in wave}) <= 16 + 9
