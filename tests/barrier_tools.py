"""The barrier protocol of the GEMM kernels, simulated with the counts that their source has.

CTAs of a cluster run as generators: the thread that issues TMA, the warp that adds the weight
scales, every consumer warp, and in grouped kernels the warp that schedules tiles. A random
scheduler takes one step of one of them at a time, or lets a copy land; some runs are lopsided, so
that one role is far ahead of another. A stage remembers which k-block each of its parts belongs to,
and a slot of the queue which tile it holds, so that whoever reads too early, or refills too early,
is caught, and so is a run in which nobody can go on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deep_gemm.jit.codegen import KERNELS
from deep_gemm.types import KernelConfig

Role = Iterator[bool]  # True: a step is done that others may have waited for. False: waiting.


class ProtocolError(AssertionError):
    pass


def source(name: str) -> str:
    """A file of the kernels, on one line and without comments."""
    return " ".join(re.sub(r"//.*", "", (KERNELS / name).read_text()).split())


def evaluate(expression: str, **names: int) -> int:
    """An expression of the source, with a "?" or without."""
    expression = expression.replace("Config::", "").replace("/", "//")
    ternary = re.fullmatch(r"(.*) \? (.*) : (.*)", expression)
    if ternary:
        expression = "({1}) if ({0}) else ({2})".format(*ternary.groups())
    return int(eval(expression, {"__builtins__": {}}, names))


def constant(name: str, file: str) -> int:
    (value,) = re.findall(rf"constexpr \w+ {name} = (\d+);", source(file))
    return int(value)


NUM_TILE_SLOTS = constant("NUM_TILE_SLOTS", "shared_storage.cuh")
LEAD = constant("LEAD", "tile_queue.cuh")


@dataclass(frozen=True)
class Counts:
    """Arrivals that end a phase of each barrier, as `init_barriers` sets them."""

    full: int
    empty: int
    queue_full: int
    queue_empty: int
    queue_wanted: int


def arrival_counts(config: KernelConfig) -> Counts:
    text = source("shared_storage.cuh")
    names = {
        "CLUSTER": config.cluster_m * config.cluster_n,
        "NUM_CONSUMERS": config.num_consumers,
        "NUM_CONSUMER_WARPS": config.num_consumers * 4,
        "NUM_SFB": 1 if 128 % config.block_n == 0 else 2,
    }

    def count(barriers: str, index: str) -> int:
        call = rf"mbarrier_init\(shared_address\(&{barriers}_barriers\[{index}\]\), ([^)]+)\);"
        (expression,) = re.findall(call, text)
        return evaluate(expression, **names)

    return Counts(
        count("full", "stage"), count("empty", "stage"),
        count("full", "slot"), count("empty", "slot"), count("wanted", "slot"),
    )  # fmt: skip


def tiles_ahead(num_k_blocks: int) -> int:
    """Tiles that the scheduler warp hands out before one is wanted."""
    (expression,) = re.findall(r"tiles_ahead = ([^;]+\?[^;]+);", source("tile_queue.cuh"))
    return evaluate(expression, num_k_blocks=num_k_blocks, LEAD=LEAD)


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes are in."""

    arrivals: int
    phase: int = 0
    missing: int = 0
    pending_bytes: int = 0

    def __post_init__(self) -> None:
        self.missing = self.arrivals

    def arrive(self, expected_bytes: int = 0) -> None:
        if self.missing == 0:
            raise ProtocolError("more arrivals than a phase can take")
        self.pending_bytes += expected_bytes
        self.missing -= 1
        self._end_phase()

    def complete(self, num_bytes: int) -> None:
        self.pending_bytes -= num_bytes
        self._end_phase()

    def _end_phase(self) -> None:
        if self.missing == 0 and self.pending_bytes == 0:
            self.phase += 1
            self.missing = self.arrivals

    def is_over(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Ring:
    """`Pipeline` of pipeline.cuh."""

    def __init__(self, full: list[Barrier], empty: list[Barrier]) -> None:
        self.full, self.empty = full, empty
        self.stage_idx = self.phase = 0

    def is_full(self) -> bool:
        return self.full[self.stage_idx].is_over(self.phase)

    def is_empty(self) -> bool:
        return self.empty[self.stage_idx].is_over(self.phase ^ 1)

    def advance(self) -> None:
        self.stage_idx = (self.stage_idx + 1) % len(self.full)
        self.phase ^= self.stage_idx == 0


@dataclass(frozen=True)
class Tile:
    """A tile of each CTA of a cluster; the whole matrix is one in a dense simulation."""

    k_blocks: int
    shares: int = 99  # shares of A that have rows; the others are not loaded
    columns: int = 99  # CTAs along N that have columns; the others load no B
    warpgroups: int = 99  # of each CTA that have rows; the others skip


@dataclass(frozen=True)
class Defects:
    """What a kernel may do wrong. `counts`: added to those of the source, by name."""

    counts: dict[str, int] = field(default_factory=dict)
    release_early: bool = False
    release_before_all_lanes: bool = False
    leave_early: bool = False
    release_slot_early: bool = False
    no_want_of_empty_tiles: bool = False
    want_twice: bool = False
    no_end_marker: bool = False
    skip_without_waiting: bool = False
    skip_without_release: bool = False
    nothing_ahead: bool = False
    peer_has_other_tiles: bool = False


class Cta:
    def __init__(self, rank_m: int, rank_n: int, num_stages: int, counts: Counts) -> None:
        def barriers(number: int, arrivals: int) -> list[Barrier]:
            return [Barrier(arrivals) for _ in range(number)]

        self.rank_m, self.rank_n = rank_m, rank_n
        self.full, self.empty = (barriers(num_stages, n) for n in (counts.full, counts.empty))
        self.stages: list[dict[Any, Any]] = [{} for _ in range(num_stages)]  # part -> k-block
        self.slots: list[Any] = [None] * NUM_TILE_SLOTS  # the number of the tile in it
        self.slot_full = barriers(NUM_TILE_SLOTS, counts.queue_full)
        self.slot_empty = barriers(NUM_TILE_SLOTS, counts.queue_empty)
        self.slot_wanted = barriers(NUM_TILE_SLOTS, counts.queue_wanted)
        self.tiles: Sequence[Tile] = ()
        self.has_left = False

    def parts(self, config: KernelConfig, tile: Tile) -> list[Any]:
        """What arrives in each stage of a tile by TMA."""
        shares = min(tile.shares, config.cluster_n)
        parts: list[Any] = [("a", i) for i in range(shares)]
        if self.rank_n < tile.columns:
            parts += [("b", i) for i in range(config.cluster_m)]
        return [*parts, ("sfa", 0)]


class Tiles:
    """One role's walk: over the queue in a grouped kernel, over what it knows in a dense one."""

    def __init__(self, cluster: Cluster, cta: Cta) -> None:
        self.cluster, self.cta = cluster, cta
        self.slots = Ring(cta.slot_full, cta.slot_empty)
        self.held: int | None = None
        self.tile_idx = -1
        self.tile: Tile | None = None

    def next(self) -> Role:
        """`self.tile` is the next one, None if there is none."""
        self.tile_idx += 1
        if self.cluster.config.is_grouped:
            is_early = self.cluster.defects.release_slot_early
            if self.held is not None and not is_early:
                self.cta.slot_empty[self.held].arrive()
                yield True
            yield from self.cluster.wait(self.slots.is_full)
            self.held = self.slots.stage_idx
            self.slots.advance()
            self.check()
            if is_early:
                self.cta.slot_empty[self.held].arrive()
                yield True
        tiles = self.cta.tiles
        self.tile = tiles[self.tile_idx] if self.tile_idx < len(tiles) else None

    def check(self) -> None:
        """Read the slot."""
        if self.held is not None and self.cta.slots[self.held] != self.tile_idx:
            found = self.cta.slots[self.held]
            raise ProtocolError(f"slot holds tile {found}, expected {self.tile_idx}")

    def want_next(self) -> None:
        if self.held is not None:
            self.cta.slot_wanted[self.held].arrive()


class Cluster:
    """`ahead`: of the scheduler warps; -1: as in the source."""

    def __init__(
        self, config: KernelConfig, tiles: Sequence[Tile], seed: int, defects: Defects, ahead: int
    ) -> None:
        self.config, self.rng, self.defects, self.ahead = (
            config, random.Random(seed), defects, ahead
        )  # fmt: skip
        counts = arrival_counts(config)
        counts = Counts(**{k: v + defects.counts.get(k, 0) for k, v in vars(counts).items()})
        ranks = [(m, n) for n in range(config.cluster_n) for m in range(config.cluster_m)]
        self.ctas = [Cta(m, n, config.num_stages, counts) for m, n in ranks]
        for cta in self.ctas:
            cta.tiles = tiles
        if defects.peer_has_other_tiles:
            self.ctas[-1].tiles = tiles[1:]
        self.copies: list[Any] = []  # under way: (target, stage, part, k-block)
        # The kernel's warpgroups hold several k-blocks only in `accumulate_groups`.
        waves = config.block_m // 64 // config.num_consumers
        self.group = config.num_partials if waves == 1 else 1
        self.agents: dict[tuple[int, int], Role] = {}
        for index, cta in enumerate(self.ctas):
            roles = [self.tma_thread(cta), self.scale_warp(cta)]
            if config.is_grouped:
                roles.append(self.scheduler_warp(cta))
            roles += [self.consumer_warp(cta, i // 4) for i in range(config.num_consumers * 4)]
            for i, role in enumerate(roles):
                self.agents[index, i] = role if defects.leave_early else self.stay(role)
        self.at_end = 0
        self.num_agents = len(self.agents)

    def stay(self, role: Role) -> Role:
        """The barrier of the cluster at the kernel's end: no CTA leaves before all are done."""
        yield from role
        self.at_end += 1
        while self.at_end < self.num_agents:
            yield False

    def wait(self, condition: Callable[[], bool]) -> Role:
        while not condition():
            yield False
        yield True

    def tma_thread(self, cta: Cta) -> Role:
        ring, tiles = Ring(cta.full, cta.empty), Tiles(self, cta)
        along_n = [other for other in self.ctas if other.rank_m == cta.rank_m]  # they share A
        along_m = [other for other in self.ctas if other.rank_n == cta.rank_n]  # they share B
        targets = {"a": along_n, "b": along_m, "sfa": [cta]}
        yield from tiles.next()
        while (tile := tiles.tile) is not None:
            parts = cta.parts(self.config, tile)
            own = [part for part in parts if part in (("a", cta.rank_n), ("b", cta.rank_m))]
            want_at = max(0, tile.k_blocks - LEAD)
            if tile.k_blocks == 0 and not self.defects.no_want_of_empty_tiles:
                tiles.want_next()
                yield True
            for k_block in range(tile.k_blocks):
                if k_block == want_at:
                    for _ in range(1 + self.defects.want_twice):
                        tiles.want_next()
                        yield True
                yield from self.wait(ring.is_empty)
                cta.full[ring.stage_idx].arrive(expected_bytes=len(parts))
                yield True
                for part in [*own, ("sfa", 0)]:
                    name = tiles.tile_idx, k_block
                    for target in targets[str(part[0])]:
                        self.copies.append((target, ring.stage_idx, part, name))
                    yield True
                ring.advance()
            yield from tiles.next()

    def scale_warp(self, cta: Cta) -> Role:
        ring, tiles = Ring(cta.full, cta.empty), Tiles(self, cta)
        yield from tiles.next()
        while (tile := tiles.tile) is not None:
            for k_block in range(tile.k_blocks):
                yield from self.wait(ring.is_empty)
                cta.stages[ring.stage_idx]["sfb"] = tiles.tile_idx, k_block
                yield True
                cta.full[ring.stage_idx].arrive()
                yield True
                ring.advance()
            yield from tiles.next()

    def scheduler_warp(self, cta: Cta) -> Role:
        slots = Ring(cta.slot_full, cta.slot_empty)
        wanted = Ring(cta.slot_wanted, cta.slot_wanted)
        ahead = 0 if self.defects.nothing_ahead else self.ahead
        for tile_idx in range(len(cta.tiles) + (not self.defects.no_end_marker)):
            yield from self.wait(slots.is_empty)
            if ahead > 0:
                ahead -= 1
            else:
                yield from self.wait(wanted.is_full)
                wanted.advance()
            cta.slots[slots.stage_idx] = "half written"
            yield True
            cta.slots[slots.stage_idx] = tile_idx
            yield True
            cta.slot_full[slots.stage_idx].arrive()
            yield True
            slots.advance()

    def consumer_warp(self, cta: Cta, warpgroup: int) -> Role:
        ring, tiles = Ring(cta.full, cta.empty), Tiles(self, cta)
        yield from tiles.next()
        while (tile := tiles.tile) is not None:
            if warpgroup >= tile.warpgroups:
                yield from self.skip(ring, tile.k_blocks)
            else:
                yield from self.accumulate(ring, cta, tiles, tile)
            yield True
            tiles.check()  # the epilogue reads the slot again
            yield from tiles.next()

    def accumulate(self, ring: Ring, cta: Cta, tiles: Tiles, tile: Tile) -> Role:
        k_block = 0
        parts = [*cta.parts(self.config, tile), "sfb"]
        while k_block < tile.k_blocks:
            count = self.group if k_block + self.group <= tile.k_blocks else 1
            held = []
            for i in range(count):
                yield from self.wait(ring.is_full)
                held.append((ring.stage_idx, (tiles.tile_idx, k_block + i)))
                read(cta, *held[-1], parts)
                yield True
                ring.advance()
            for stage_idx, name in held:
                if self.defects.release_before_all_lanes:  # one lane speaks for its warp
                    lane = self.lagging_lane(cta, stage_idx, name)
                    self.agents[self.ctas.index(cta), self.num_agents] = lane
                    self.num_agents += 1
                elif not self.defects.release_early:
                    yield True  # the tensor core, and lanes that read scales, may read until here
                    read(cta, stage_idx, name, parts)
                yield from self.release(stage_idx)
                if self.defects.release_early:
                    read(cta, stage_idx, name, parts)
            k_block += count

    def lagging_lane(self, cta: Cta, stage_idx: int, name: tuple[int, int]) -> Role:
        yield True
        read(cta, stage_idx, name, ["sfb"])
        self.at_end += 1

    def skip(self, ring: Ring, count: int) -> Role:
        for _ in range(count):
            if not self.defects.skip_without_waiting:
                yield from self.wait(ring.is_full)
            if not self.defects.skip_without_release:
                yield from self.release(ring.stage_idx)
            ring.advance()

    def release(self, stage_idx: int) -> Role:
        for other in self.ctas:
            if other.has_left:
                raise ProtocolError("an arrival at a CTA that has left")
            other.empty[stage_idx].arrive()
            yield True

    def run(self) -> None:
        speeds = {name: self.rng.choice([0.02, 1, 1, 20]) for name in self.agents}
        copy_speed = self.rng.choice([0.1, 1, 10])
        waiting: set[tuple[int, int]] = set()
        while self.agents:
            ready: list[Any] = [name for name in self.agents if name not in waiting]
            weights = [speeds.get(name, 1) for name in ready]
            if self.copies:
                ready.append(None)
                weights.append(copy_speed)
            if not ready:
                raise ProtocolError(f"deadlock: {sorted(self.agents)} wait")
            name = self.rng.choices(ready, weights)[0]
            if name is None:
                self.land(*self.copies.pop(self.rng.randrange(len(self.copies))))
                waiting.clear()
                continue
            try:
                has_moved = next(self.agents[name])
            except StopIteration:
                del self.agents[name]
                if all(other[0] != name[0] for other in self.agents):
                    self.ctas[name[0]].has_left = True
                has_moved = True
            if has_moved:
                waiting.clear()  # whoever waited may go on
            else:
                waiting.add(name)

    def land(self, target: Cta, stage_idx: int, part: Any, name: Any) -> None:
        if target.has_left:
            raise ProtocolError("a copy into a CTA that has left")
        target.stages[stage_idx][part] = name
        target.full[stage_idx].complete(1)


def read(cta: Cta, stage_idx: int, name: tuple[int, int], parts: list[Any]) -> None:
    for part in parts:
        found = cta.stages[stage_idx].get(part)
        if found != name:
            raise ProtocolError(
                f"k-block {name} expected, {part} is of {found}: read before it was "
                f"full, or refilled before it was empty"
            )
