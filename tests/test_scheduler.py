"""The device scheduler, compiled for the CPU: every tile once, clusters stay together."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import deep_gemm

KERNELS = Path(deep_gemm.__file__).parent / "kernels"
CLUSTERS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]

HARNESS = """
#include "scheduler.cuh"
template <int M, int N> struct Config { static constexpr int CLUSTER_M = M, CLUSTER_N = N; };
// Writes the tiles of one CTA as four numbers each; returns how many there are.
template <int M, int N> uint32_t walk(const uint32_t* p, uint32_t* out, uint32_t capacity) {
    DenseScheduler<Config<M, N>> scheduler(p[0], p[1], p[2], p[3], p[4], p[5]);
    uint32_t count = 0;
    for (Tile tile; scheduler.next(tile); ++count) {
        if (count == capacity) return count + 1;
        out[4 * count] = tile.m_block_idx, out[4 * count + 1] = tile.n_block_idx;
        out[4 * count + 2] = tile.k_block_begin, out[4 * count + 3] = tile.k_block_end;
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
        [compiler, "-std=c++17", "-O1", "-Wall", "-shared", "-fPIC", f"-I{KERNELS}", "harness.cpp"]
        + ["-o", "harness.so"],
        cwd=folder,
        check=True,
    )
    library = ctypes.CDLL(str(folder / "harness.so"))

    def tiles_of(cluster, m_blocks, n_blocks, k_blocks, raster_m, cta_idx, num_ctas):
        capacity = m_blocks * n_blocks + 1
        parameters = (ctypes.c_uint32 * 6)(
            m_blocks, n_blocks, k_blocks, raster_m, cta_idx, num_ctas
        )
        out = (ctypes.c_uint32 * (4 * capacity))()
        count = getattr(library, f"walk_{cluster[0]}_{cluster[1]}")(parameters, out, capacity)
        assert count <= capacity, "a CTA has more tiles than D"
        return [tuple(out[4 * i : 4 * i + 4]) for i in range(count)]

    return tiles_of


@given(
    cluster=st.sampled_from(CLUSTERS),
    m_blocks=st.integers(1, 70),
    n_blocks=st.integers(1, 40),
    k_blocks=st.integers(1, 200),
    raster_m=st.integers(1, 20),
    clusters=st.integers(1, 132),
)
@example(cluster=(2, 1), m_blocks=3, n_blocks=43, k_blocks=2, raster_m=8, clusters=66)
@example(cluster=(1, 2), m_blocks=11, n_blocks=11, k_blocks=3, raster_m=16, clusters=66)
def test_every_tile_once_and_clusters_stay_together(
    walk, cluster, m_blocks, n_blocks, k_blocks, raster_m, clusters
):
    size = cluster[0] * cluster[1]
    walks = [
        walk(cluster, m_blocks, n_blocks, k_blocks, raster_m, cta, clusters * size)
        for cta in range(clusters * size)
    ]
    inside = [
        tile[:2] for tiles in walks for tile in tiles if tile[0] < m_blocks and tile[1] < n_blocks
    ]
    assert len(inside) == len(set(inside)) == m_blocks * n_blocks
    assert all(tile[2:] == (0, k_blocks) for tiles in walks for tile in tiles)
    for first in range(0, clusters * size, size):
        unit = walks[first : first + size]
        assert len({len(tiles) for tiles in unit}) == 1, "CTAs of a cluster disagree on their tiles"
        for tiles in zip(*unit, strict=True):
            m0, n0 = tiles[0][:2]
            expected = [
                (m0 + rank % cluster[0], n0 + rank // cluster[0], *tiles[0][2:])
                for rank in range(size)
            ]
            assert list(tiles) == expected


def test_the_clusters_of_one_wave_cover_a_compact_rectangle(walk):
    """132 CTAs side by side read few rows of A and B: that is what the raster bands are for."""
    wave = [walk((1, 1), 64, 64, 1, 16, cta, 132)[0] for cta in range(132)]
    assert len({tile[0] for tile in wave}) + len({tile[1] for tile in wave}) <= 16 + 9
