"""The barrier table of shared_storage.cuh, recomputed: the protocol is simulated, counts as parsed.

CTAs of a cluster run as generators: the thread that issues TMA, the warp that adds the weight
scales, every consumer warp. A random scheduler takes one step of one of them at a time, or lets a
copy land; some runs are lopsided, so that one role is far ahead of another. A stage remembers which
k-block each of its parts belongs to, so that whoever reads a part too early, or refills it too
early, is caught, and so is a run in which nobody can go on.
"""

import random
import re
from dataclasses import dataclass

import pytest
from dense_tools import CONFIGS, config_id

from deep_gemm.jit.codegen import KERNELS

SEEDS = range(12)
MANY_SEEDS = range(150)  # at most: until a defect shows itself


class ProtocolError(AssertionError):
    pass


def arrival_counts(config):
    """(full, empty) as `init_barriers` sets them, for `config`."""
    text = (KERNELS / "shared_storage.cuh").read_text()
    names = {
        "CLUSTER": config.cluster_m * config.cluster_n,
        "NUM_CONSUMER_WARPS": config.num_consumers * 4,
    }
    counts = [
        re.search(rf"mbarrier_init\(shared_address\(&{name}_barriers\[stage\]\), ([^)]+)\);", text)
        for name in ("full", "empty")
    ]
    return tuple(eval(count[1], {"__builtins__": {}}, names) for count in counts)


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes are in."""

    arrivals: int
    phase: int = 0
    missing: int = 0
    pending_bytes: int = 0

    def __post_init__(self):
        self.missing = self.arrivals

    def arrive(self, expected_bytes=0):
        if self.missing == 0:
            raise ProtocolError("more arrivals than a phase can take")
        self.pending_bytes += expected_bytes
        self.missing -= 1
        self._end_phase()

    def complete(self, num_bytes):
        self.pending_bytes -= num_bytes
        self._end_phase()

    def _end_phase(self):
        if self.missing == 0 and self.pending_bytes == 0:
            self.phase += 1
            self.missing = self.arrivals

    def is_over(self, parity):
        return self.phase % 2 != parity


class Ring:
    """`Pipeline` of pipeline.cuh."""

    def __init__(self, cta, num_stages):
        self.cta, self.num_stages = cta, num_stages
        self.stage_idx = self.phase = 0

    def is_full(self):
        return self.cta.full[self.stage_idx].is_over(self.phase)

    def is_empty(self):
        return self.cta.empty[self.stage_idx].is_over(self.phase ^ 1)

    def advance(self):
        self.stage_idx = (self.stage_idx + 1) % self.num_stages
        self.phase ^= self.stage_idx == 0


class Cta:
    def __init__(self, rank_m, rank_n, num_stages, full, empty):
        self.rank_m, self.rank_n = rank_m, rank_n
        self.full = [Barrier(full) for _ in range(num_stages)]
        self.empty = [Barrier(empty) for _ in range(num_stages)]
        self.stages = [{} for _ in range(num_stages)]  # part -> k-block that it belongs to
        self.has_left = False


class Cluster:
    def __init__(self, config, full, empty, steps, seed, release_early=False, leave_early=False):
        self.config, self.steps, self.rng = config, steps, random.Random(seed)
        self.release_early = release_early
        ranks = [(m, n) for n in range(config.cluster_n) for m in range(config.cluster_m)]
        self.ctas = [Cta(m, n, config.num_stages, full, empty) for m, n in ranks]
        self.copies = []  # under way: (target, stage, part, k-block)
        self.parts = [("a", i) for i in range(config.cluster_n)]
        self.parts += [("b", i) for i in range(config.cluster_m)]
        self.parts += [("sfa", 0)]
        # The kernel's warpgroups hold several k-blocks only in `accumulate_groups`.
        waves = config.block_m // 64 // config.num_consumers
        self.group = config.num_partials if waves == 1 else 1
        self.agents = {}
        for index, cta in enumerate(self.ctas):
            roles = [self.tma_thread(cta), self.scale_warp(cta)]
            roles += [self.consumer_warp(cta) for _ in range(config.num_consumers * 4)]
            if leave_early:
                self.agents.update({(index, i): role for i, role in enumerate(roles)})
                continue
            self.agents.update({(index, i): self.stay(role) for i, role in enumerate(roles)})
        self.at_end = 0
        self.num_agents = len(self.agents)

    def stay(self, role):
        """The barrier of the cluster at the kernel's end: no CTA leaves before all are done."""
        yield from role
        self.at_end += 1
        while self.at_end < self.num_agents:
            yield False

    # Roles. `yield True`: a step is done that others may have waited for. `yield False`: waiting.

    def wait(self, condition):
        while not condition():
            yield False
        yield True

    def tma_thread(self, cta):
        ring = Ring(cta, self.config.num_stages)
        along_n = [other for other in self.ctas if other.rank_m == cta.rank_m]  # they share A
        along_m = [other for other in self.ctas if other.rank_n == cta.rank_n]  # they share B
        for k_block in range(self.steps):
            yield from self.wait(ring.is_empty)
            cta.full[ring.stage_idx].arrive(expected_bytes=len(self.parts))
            yield True
            for targets, part in (
                (along_n, ("a", cta.rank_n)),
                (along_m, ("b", cta.rank_m)),
                ([cta], ("sfa", 0)),
            ):
                self.copies += [(target, ring.stage_idx, part, k_block) for target in targets]
                yield True
            ring.advance()

    def scale_warp(self, cta):
        ring = Ring(cta, self.config.num_stages)
        for k_block in range(self.steps):
            yield from self.wait(ring.is_empty)
            cta.stages[ring.stage_idx]["sfb"] = k_block
            yield True
            cta.full[ring.stage_idx].arrive()
            yield True
            ring.advance()

    def consumer_warp(self, cta):
        ring = Ring(cta, self.config.num_stages)
        k_block = 0
        while k_block < self.steps:
            count = self.group if k_block + self.group <= self.steps else 1
            held = []
            for i in range(count):
                yield from self.wait(ring.is_full)
                held.append((ring.stage_idx, k_block + i))
                self.read(cta, *held[-1])
                ring.advance()
            for stage_idx, block in held:
                if not self.release_early:
                    yield True  # the tensor core may read until here
                    self.read(cta, stage_idx, block)
                for other in self.ctas:
                    if other.has_left:
                        raise ProtocolError("an arrival at a CTA that has left")
                    other.empty[stage_idx].arrive()
                    yield True
                if self.release_early:
                    self.read(cta, stage_idx, block)
            k_block += count

    def read(self, cta, stage_idx, k_block):
        stage = cta.stages[stage_idx]
        for part in [*self.parts, "sfb"]:
            if stage.get(part) != k_block:
                raise ProtocolError(
                    f"k-block {k_block} expected, {part} is of {stage.get(part)}: "
                    f"read before it was full, or refilled before it was empty"
                )

    def run(self):
        speeds = {name: self.rng.choice([0.02, 1, 1, 20]) for name in self.agents}
        copy_speed = self.rng.choice([0.1, 1, 10])
        waiting = set()
        while self.agents:
            ready = [name for name in self.agents if name not in waiting]
            weights = [speeds[name] for name in ready]
            if self.copies:
                ready.append(None)
                weights.append(copy_speed)
            if not ready:
                raise ProtocolError(f"deadlock: {sorted(self.agents)} wait")
            name = self.rng.choices(ready, weights)[0]
            if name is None:
                self.land(self.copies.pop(self.rng.randrange(len(self.copies))))
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

    def land(self, copy):
        target, stage_idx, part, k_block = copy
        if target.has_left:
            raise ProtocolError("a copy into a CTA that has left")
        target.stages[stage_idx][part] = k_block
        target.full[stage_idx].complete(1)


def simulate(config, full=0, empty=0, steps=None, seeds=SEEDS, **defects):
    """Run with the counts of the source, plus `full` and `empty`; raises ProtocolError."""
    counts = arrival_counts(config)
    for seed in seeds:
        steps_of_seed = steps or 2 * config.num_stages + 1 + seed % 3
        Cluster(config, counts[0] + full, counts[1] + empty, steps_of_seed, seed, **defects).run()


def pick(*keys):
    """Configs by (block_m, block_n, cluster_m, cluster_n, num_stages)."""
    by_key = {(c.block_m, c.block_n, c.cluster_m, c.cluster_n, c.num_stages): c for c in CONFIGS}
    return [by_key[key] for key in keys]


# Small pipelines, since defects show soonest there; a group of k-blocks; both kinds of cluster.
FEW = pick((64, 128, 1, 1, 2), (128, 128, 1, 1, 5), (192, 128, 2, 1, 4), (192, 128, 1, 2, 4))
few = pytest.mark.parametrize("config", FEW, ids=config_id)
clusters = pytest.mark.parametrize("config", FEW[2:], ids=config_id)


def test_counts_are_those_of_the_table():
    text = (KERNELS / "shared_storage.cuh").read_text()
    for config in CONFIGS:
        arrive_counts = 2, config.cluster_size * config.num_consumers * 4
        assert arrival_counts(config) == arrive_counts
    assert "CLUSTER * NUM_CONSUMERS * 4 arrivals" in text
    assert "1 arrive.expect_tx" in text and "1 arrive " in text


def test_the_kernel_arrives_as_often_as_the_simulation():
    """One expect_tx and one plain arrival a stage, and one for each warp and CTA at release."""
    text = (KERNELS / "fp8_gemm_1d2d.cuh").read_text()
    assert len(re.findall(r"\bmbarrier_arrive_expect_tx\(full, stage_bytes\)", text)) == 1
    assert len(re.findall(r"\bmbarrier_arrive\(pipeline\.full\(\)\)", text)) == 1
    assert len(re.findall(r"if \(lane_idx == 0\) mbarrier_arrive\(empty\)", text)) == 1
    pattern = r"if \(lane_idx < CLUSTER\) mbarrier_arrive_cluster\(empty, lane_idx\)"
    assert len(re.findall(pattern, text)) == 1
    assert len(re.findall(r"\bmbarrier_(?:arrive|expect)\w*\(", text)) == 4
    assert len(re.findall(r"\brelease\(stage", text)) == 2, "one for each way to accumulate"


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_no_deadlock_and_no_early_refill(config):
    simulate(config, seeds=SEEDS if config.cluster_size == 1 else range(4))


@few
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_fewer_k_blocks_than_stages(config, steps):
    simulate(config, steps=steps)


@few
@pytest.mark.parametrize("full, empty", [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_a_wrong_count_is_noticed(config, full, empty):
    with pytest.raises(ProtocolError):
        simulate(config, full, empty, seeds=MANY_SEEDS)


@few
def test_a_release_before_the_last_read_is_noticed(config):
    with pytest.raises(ProtocolError, match="refilled before it was empty"):
        simulate(config, seeds=MANY_SEEDS, release_early=True)


@clusters
def test_arrivals_of_one_cta_only_are_noticed(config):
    """With the count of a single CTA, a peer's multicast would write into stages in use."""
    with pytest.raises(ProtocolError):
        simulate(config, empty=-config.num_consumers * 4, seeds=MANY_SEEDS)


@clusters
def test_leaving_without_the_last_cluster_barrier_is_noticed(config):
    with pytest.raises(ProtocolError, match="has left"):
        simulate(config, seeds=MANY_SEEDS, leave_early=True)


def test_more_stages_held_than_there_are_is_a_deadlock():
    """What the kernel's static_assert on NUM_PARTIALS is for."""
    (config,) = pick((64, 128, 1, 1, 2))
    with pytest.raises(ProtocolError, match="deadlock"):
        cluster = Cluster(config, *arrival_counts(config), steps=6, seed=0)
        cluster.group = 3
        cluster.run()
