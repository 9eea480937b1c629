"""The barrier table of shared_storage.cuh, recomputed: the protocol is simulated, counts as parsed.

`barrier_tools.py` has the simulation. Whatever is wrong with a count, or with the order of steps,
has to show itself there.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

import pytest
from barrier_tools import (
    LEAD,
    NUM_TILE_SLOTS,
    Cluster,
    Counts,
    Defects,
    ProtocolError,
    Tile,
    arrival_counts,
    source,
    tiles_ahead,
)
from dense_tools import CONFIGS, config_id
from grouped_tools import GROUPED_CONFIGS

from deep_gemm.jit.codegen import KERNELS
from deep_gemm.plan import make_config
from deep_gemm.types import KernelConfig

SEEDS = range(12)
MANY_SEEDS = range(150)  # at most: until a defect shows itself


def simulate(
    config: KernelConfig, steps: int | None = None, seeds: Iterable[int] = SEEDS, **defects: int
) -> None:
    """A dense kernel, all of its tiles as one of many k-blocks; raises ProtocolError.

    `full`, `empty`: added to the counts of the source; other defects by name.
    """
    counts = {name: defects.pop(name, 0) for name in ("full", "empty")}
    for seed in seeds:
        k_blocks = steps or 2 * config.num_stages + 1 + seed % 3
        defect = Defects(counts, **{name: bool(value) for name, value in defects.items()})
        Cluster(config, [Tile(k_blocks)], seed, defect, -1).run()


# Small pipelines, since defects show soonest there; a group of k-blocks; both kinds of cluster.
FEW = [
    make_config(64, 128, 1, num_stages=2, num_partials=2),
    make_config(128, 128, 2, num_stages=5),
    make_config(192, 128, 3, cluster_m=2),
    make_config(192, 128, 3, cluster_n=2),
]
few = pytest.mark.parametrize("config", FEW, ids=config_id)
clusters = pytest.mark.parametrize("config", FEW[2:], ids=config_id)


def test_counts_are_those_of_the_table() -> None:
    text = (KERNELS / "shared_storage.cuh").read_text()
    for config in [*CONFIGS, *GROUPED_CONFIGS]:
        warps = config.num_consumers * 4
        assert arrival_counts(config) == Counts(2, config.cluster_size * warps, 1, warps + 2, 1)
    assert "CLUSTER * NUM_CONSUMERS * 4 arrivals" in text
    assert "NUM_CONSUMER_WARPS + 2 arrivals" in text
    assert "1 arrive.expect_tx" in text and "1 arrive " in text


def test_the_kernel_arrives_as_often_as_the_simulation() -> None:
    """One expect_tx and one plain arrival a stage, and one for each warp and CTA at release."""
    producer, consumer = source("producer.cuh"), source("consumer.cuh")
    arrivals = re.compile(r"\bmbarrier_(?:arrive|expect)\w*\([^;]*;")
    assert arrivals.findall(producer) == [
        "mbarrier_arrive_expect_tx(full, stage_bytes);",
        "mbarrier_arrive(pipeline.full());",
    ]
    assert arrivals.findall(consumer) == [
        "mbarrier_arrive(empty);",
        "mbarrier_arrive_cluster(empty, lane_idx);",
    ]
    assert "if (lane_idx == step) {" in producer, "one lane of the scale warp"
    assert "if (lane_idx == 0) mbarrier_arrive(empty);" in consumer
    assert "if (lane_idx < CLUSTER) mbarrier_arrive_cluster(empty, lane_idx);" in consumer
    releases = re.findall(r"\brelease\((\w+)", consumer)
    assert sorted(releases) == ["acquire", "const", "stage", "stage"], "to skip, two ways to sum"
    body = re.search(r"void release\(const Stage& stage\) const \{(.*?)mbarrier_arrive", consumer)
    assert body and body[1].startswith(" __syncwarp();"), "one lane speaks for its warp"
    for name in ("fp8_gemm_1d2d.cuh", "epilogue.cuh", "scheduler.cuh", "grouped_scheduler.cuh"):
        assert "mbarrier_" not in source(name)


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_no_deadlock_and_no_early_refill(config: KernelConfig) -> None:
    simulate(config, seeds=SEEDS if config.cluster_size == 1 else range(4))


@few
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_fewer_k_blocks_than_stages(config: KernelConfig, steps: int) -> None:
    simulate(config, steps)


@few
@pytest.mark.parametrize("full, empty", [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_a_wrong_count_is_noticed(config: KernelConfig, full: int, empty: int) -> None:
    with pytest.raises(ProtocolError):
        simulate(config, seeds=MANY_SEEDS, full=full, empty=empty)


@few
def test_a_release_before_the_last_read_is_noticed(config: KernelConfig) -> None:
    with pytest.raises(ProtocolError, match="refilled before it was empty"):
        simulate(config, seeds=MANY_SEEDS, release_early=True)


@few
def test_a_release_before_all_lanes_have_read_is_noticed(config: KernelConfig) -> None:
    with pytest.raises(ProtocolError, match="refilled before it was empty"):
        simulate(config, seeds=MANY_SEEDS, release_before_all_lanes=True)


@clusters
def test_arrivals_of_one_cta_only_are_noticed(config: KernelConfig) -> None:
    """With the count of a single CTA, a peer's multicast would write into stages in use."""
    with pytest.raises(ProtocolError):
        simulate(config, seeds=MANY_SEEDS, empty=-config.num_consumers * 4)


@clusters
def test_leaving_without_the_last_cluster_barrier_is_noticed(config: KernelConfig) -> None:
    with pytest.raises(ProtocolError, match="has left"):
        simulate(config, seeds=MANY_SEEDS, leave_early=True)


def test_more_stages_held_than_there_are_is_a_deadlock() -> None:
    """What the kernel's static_assert on NUM_PARTIALS is for."""
    cluster = Cluster(FEW[0], [Tile(6)], 0, Defects(), -1)
    cluster.group = 3
    with pytest.raises(ProtocolError, match="deadlock"):
        cluster.run()


# Grouped kernels: tiles come through a queue


def random_tiles(rng: random.Random, config: KernelConfig, k_blocks: int) -> list[Tile]:
    """Tiles of one launch, more than the queue has slots; those without a valid row sum nothing."""
    tiles = []
    for _ in range(rng.choice([1, NUM_TILE_SLOTS, 2 * NUM_TILE_SLOTS + 3])):
        rows = rng.randint(0, config.block_m)
        share, part = config.block_m // config.cluster_n, config.block_m // config.num_consumers
        tiles.append(
            Tile(
                k_blocks=k_blocks if rows else 0,
                shares=-(-rows // share),
                columns=rng.randint(1, config.cluster_n),
                warpgroups=-(-rows // part),
            )
        )
    return tiles


def simulate_grouped(
    config: KernelConfig,
    k_blocks: Iterable[int] = (1, LEAD, 7),
    seeds: Iterable[int] = range(3),
    tiles: list[Tile] | None = None,
    defects: Defects | None = None,
) -> None:
    for seed in seeds:
        for count in k_blocks:
            of_launch = tiles or random_tiles(random.Random(seed), config, count)
            Cluster(config, of_launch, seed, defects or Defects(), tiles_ahead(count)).run()


GROUPED = [
    make_config(64, 64, 1, num_partials=4, is_grouped=True),
    make_config(64, 128, 1, cluster_n=2, num_stages=2, num_partials=2, is_grouped=True),
    make_config(128, 128, 2, is_grouped=True),
    make_config(192, 128, 3, num_stages=2, is_grouped=True),
    make_config(192, 128, 3, cluster_n=2, is_grouped=True),
]
grouped = pytest.mark.parametrize("config", GROUPED, ids=config_id)
grouped_clusters = pytest.mark.parametrize("config", [GROUPED[1], GROUPED[4]], ids=config_id)


def assert_noticed(
    config: KernelConfig, defects: Defects, match: str | None = None, **more: object
) -> None:
    with pytest.raises(ProtocolError, match=match):
        simulate_grouped(config, seeds=MANY_SEEDS, defects=defects, **more)  # type: ignore[arg-type]


def test_the_queue_is_used_as_in_the_simulation() -> None:
    queue, producer = source("tile_queue.cuh"), source("producer.cuh")
    assert re.findall(r"\bmbarrier_arrive\w*\([^;]*;", queue) == [
        "mbarrier_arrive(slots.full());",
        "mbarrier_arrive(shared_address(&queue.wanted_barriers[slot_idx]));",
        "mbarrier_arrive(slots.empty_barriers + slot_idx * 8);",
    ]
    for line in (
        "slots.wait_empty(); if (tiles_ahead > 0) { --tiles_ahead; } else { wanted.wait_full(); "
        "wanted.advance(); }",
        "Pipeline<NUM_TILE_SLOTS> wanted(queue.wanted_barriers, queue.wanted_barriers);",
        "} __syncwarp(); slots.advance(); } while (is_tile);",
        "slots.wait_full(); slot_idx = slots.stage_idx; slots.advance();",
    ):
        assert line in queue, "the scheduler warp waits, fills a slot and moves on"
    for line in (
        "uint32_t want_at = tile.k_block_begin;",
        "if (tile.k_block_end > LEAD) want_at = tile.k_block_end - LEAD;",
        "if (tile.k_block_begin == tile.k_block_end) tiles.want_next();",
        "if (k_block == want_at) tiles.want_next(); pipeline.wait_empty();",
    ):
        assert line in producer, "the TMA warp wants a tile, once for each that it gets"
    assert producer.count("want_next") == 2
    assert "for (; count > 0; --count) release(acquire());" in source("consumer.cuh")
    warps = re.findall(r"if \(warp_idx == (\d)\) (\w+)<Config>", source("fp8_gemm_1d2d.cuh"))
    roles = [("0", "load_tiles"), ("1", "load_weight_scales"), ("2", "schedule_tiles")]
    assert warps == roles, "two of them are readers beside the consumers"


def test_some_tiles_are_ahead_where_k_is_short() -> None:
    """So that the loads that are under way cover LEAD k-blocks; not more than there are slots."""
    assert tiles_ahead(LEAD + 1) == tiles_ahead(100) == 1
    for k_blocks in range(1, LEAD + 1):
        assert tiles_ahead(k_blocks) * k_blocks >= LEAD + k_blocks
        assert 1 < tiles_ahead(k_blocks) < NUM_TILE_SLOTS
        assert (tiles_ahead(k_blocks) - 1) * k_blocks < LEAD + k_blocks


@pytest.mark.parametrize("config", GROUPED_CONFIGS, ids=config_id)
def test_grouped_no_deadlock_and_no_early_refill(config: KernelConfig) -> None:
    simulate_grouped(config)


@grouped
@pytest.mark.parametrize("k_blocks", [1, 2, LEAD, LEAD + 1])
def test_short_sums(config: KernelConfig, k_blocks: int) -> None:
    simulate_grouped(config, [k_blocks], range(4))


@grouped
@pytest.mark.parametrize("num_tiles", [0, 1, NUM_TILE_SLOTS - 1, 3 * NUM_TILE_SLOTS])
def test_tiles_without_a_valid_row(config: KernelConfig, num_tiles: int) -> None:
    """Padding may be all that a launch has to write."""
    empty = [Tile(0, 0, 1, 0)] * num_tiles
    simulate_grouped(config, [5], tiles=[*empty, Tile(5), *empty], seeds=range(2))
    for seed in range(4):
        Cluster(config, empty, seed, Defects(), tiles_ahead(5)).run()


@grouped
@pytest.mark.parametrize("name", ["full", "empty", "queue_full", "queue_empty", "queue_wanted"])
@pytest.mark.parametrize("change", [1, -1])
def test_a_wrong_count_of_a_grouped_kernel_is_noticed(
    config: KernelConfig, name: str, change: int
) -> None:
    assert_noticed(config, Defects({name: change}))


@grouped
@pytest.mark.parametrize(
    "defect, match",
    [
        ("release_early", "refilled before it was empty"),
        ("release_slot_early", "slot holds"),
        ("no_want_of_empty_tiles", "deadlock"),
        ("want_twice", None),
        ("no_end_marker", "deadlock"),
        ("nothing_ahead", "deadlock"),
    ],
)
def test_a_defect_of_a_grouped_kernel_is_noticed(
    config: KernelConfig, defect: str, match: str | None
) -> None:
    assert_noticed(config, Defects(**{defect: True}), match)


@pytest.mark.parametrize("config", GROUPED[2:], ids=config_id)
def test_warpgroups_without_rows_have_to_take_part(config: KernelConfig) -> None:
    tiles = [Tile(9, 1, 1, 1)] * 4
    assert_noticed(config, Defects(skip_without_waiting=True), tiles=tiles)
    assert_noticed(config, Defects(skip_without_release=True), "deadlock", tiles=tiles)


@grouped_clusters
def test_defects_of_a_cluster_of_a_grouped_kernel_are_noticed(config: KernelConfig) -> None:
    assert_noticed(config, Defects(leave_early=True), "has left")
    assert_noticed(config, Defects({"empty": -config.num_consumers * 4}))
    tiles = [Tile(3), Tile(0, 0, 1, 0), Tile(3)]
    assert_noticed(config, Defects(peer_has_other_tiles=True), tiles=tiles)
