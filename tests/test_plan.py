"""The planner: known shapes get known kernels, and no plan asks for what the GPU does not have."""

import ast
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deep_gemm.grouped_cost
import deep_gemm.plan
from deep_gemm.plan import (
    CANDIDATES,
    GROUPED_CANDIDATES,
    SMEM_LIMIT,
    make_config,
    make_plan,
    predicted_us,
    units,
)
from deep_gemm.types import KernelConfig, Problem

HOPPER_SMS = [132, 114, 78]  # H100 SXM, H200, H800; H100 PCIe; H20

# (n, k) of the layers in large mixture-of-experts models, and how many kernels serve all m. Eight
# are the goal (each is compiled at first use); those above it stand here with what they need.
KERNELS_OF_A_WEIGHT = {
    (576, 7168): 10,
    (2112, 7168): 13,
    (4096, 7168): 9,
    (7168, 2048): 9,
    (7168, 16384): 9,
    (7168, 18432): 9,
    (18432, 7168): 9,
    (24576, 1536): 8,
    (32768, 512): 8,
}


def problem(m, n, k):
    return Problem("dense", m, n, k, "cuda:0", k, k, n, (-(-k // 128), 1))


@pytest.mark.parametrize(
    "m, n, k, tile, grid",
    [
        (1, 2112, 7168, (64, 16, 1, 1), 132),
        (64, 2112, 7168, (64, 32, 1, 1), 66),
        (128, 7168, 2048, (64, 128, 1, 1), 112),
        (512, 4096, 7168, (128, 128, 1, 1), 128),
        (2048, 7168, 2048, (192, 128, 1, 2), 132),
        (4096, 4096, 7168, (256, 128, 1, 2), 132),
        (4096, 7168, 16384, (256, 128, 1, 2), 132),
        (8192, 24576, 1536, (192, 128, 1, 2), 132),
        (4096, 576, 7168, (192, 96, 1, 1), 132),
        (100, 32768, 512, (128, 128, 1, 1), 132),
    ],
)
def test_known_plans(m, n, k, tile, grid):
    plan = make_plan(problem(m, n, k), 132)
    config = plan.kernel
    assert (config.block_m, config.block_n, config.cluster_m, config.cluster_n) == tile
    assert plan.launch.grid == grid


@pytest.mark.parametrize("n, k", KERNELS_OF_A_WEIGHT)
def test_few_kernels_serve_all_m(n, k):
    rows = [*range(1, 1025), *range(1025, 16385, 61)]
    kernels = {make_plan(problem(m, n, k), 132).kernel for m in rows}
    assert len(kernels) <= KERNELS_OF_A_WEIGHT[n, k]


@given(
    m=st.integers(1, 1 << 20),
    n=st.integers(1, 1 << 14).map(lambda x: 8 * x),
    k=st.integers(1, 1 << 11).map(lambda x: 16 * x),
    num_sms=st.integers(1, 132) | st.sampled_from(HOPPER_SMS),
    pdl=st.booleans(),
)
def test_every_plan_fits(m, n, k, num_sms, pdl):
    plan = make_plan(problem(m, n, k), num_sms, pdl)
    config, launch = plan.kernel, plan.launch
    assert 0 < launch.grid <= num_sms
    assert launch.grid % launch.cluster == 0 and launch.cluster == config.cluster_size
    assert launch.grid <= units(problem(m, n, k), config) * config.cluster_size
    assert launch.smem_bytes == config.smem_bytes <= SMEM_LIMIT
    assert launch.threads == config.num_threads <= 512
    assert launch.pdl is pdl
    assert plan.raster_m >= 1
    assert plan.predicted_us > 0


@pytest.mark.parametrize("num_sms", HOPPER_SMS)
def test_the_candidate_of_the_least_predicted_time_is_taken(num_sms):
    for sizes in ((1, 2112, 7168), (300, 4096, 7168), (5000, 7168, 2048)):
        times = [predicted_us(problem(*sizes), c, num_sms) for c in CANDIDATES]
        plan = make_plan(problem(*sizes), num_sms)
        assert plan.predicted_us == min(times)
        assert plan.kernel == CANDIDATES[times.index(min(times))].config


def test_more_work_never_takes_less_time():
    for candidate in CANDIDATES:
        for sizes, more in (
            ((512, 4096, 1024), (512, 4096, 2048)),
            ((512, 4096, 1024), (1024, 4096, 1024)),
            ((512, 4096, 1024), (512, 8192, 1024)),
        ):
            times = [predicted_us(problem(*each), candidate, 132) for each in (sizes, more)]
            assert times[0] < times[1], candidate


def test_strides_and_addresses_do_not_matter():
    narrow = problem(300, 520, 1040)
    wide = dataclasses.replace(narrow, a_stride=4096, b_stride=2048, d_stride=1024, device="cuda:1")
    assert make_plan(narrow, 132) == make_plan(wide, 132)


def test_one_sm_gets_no_cluster():
    for m in (1, 200, 5000):
        assert make_plan(problem(m, 4096, 7168), 1).launch.cluster == 1


def test_an_explicit_config_is_taken():
    config = make_config(128, 96, 2, cluster_m=2)
    plan = make_plan(problem(300, 520, 1040), 132, True, config)
    assert plan.kernel == config and plan.predicted_us is None
    assert plan.launch.grid == units(problem(300, 520, 1040), config) * 2 and plan.launch.pdl
    known = CANDIDATES[3].config
    plan = make_plan(problem(300, 520, 1040), 132, False, known)
    assert plan.kernel == known and plan.predicted_us > 0


def test_a_config_that_does_not_fit_is_refused():
    large = KernelConfig(256, 128, 2, 5)
    with pytest.raises(ValueError, match=rf"{large.smem_bytes} bytes .* at most {SMEM_LIMIT}"):
        make_plan(problem(300, 520, 1040), 132, config=large)
    cluster = make_config(128, 96, 2, cluster_n=2)
    with pytest.raises(ValueError, match="2 SMs for a cluster, expected at most .* and 1"):
        make_plan(problem(300, 520, 1040), 1, config=cluster)
    with pytest.raises(ValueError, match="256 x 192 tile leaves no room for 4 stages"):
        make_config(256, 192, 2, num_partials=4)


def test_candidates_differ_and_cost_something():
    assert len({candidate.config for candidate in CANDIDATES}) == len(CANDIDATES)
    assert all(c.k_block_us > 0 and c.tile_us > 0 for c in CANDIDATES)
    tiles = {(c.config.block_m, c.config.block_n, c.config.num_consumers) for c in CANDIDATES}
    assert {(256, 128, 2), (192, 128, 3)} <= tiles


def test_smem_bytes_is_the_sum_of_the_parts():
    """As laid out in shared_storage.cuh; the kernel asserts the same number."""
    config = KernelConfig(192, 96, 3, 5, slab_n=32, num_d_slabs=3)
    a, b = 5 * 192 * 128, 5 * 96 * 128
    d = 12 * 3 * 16 * 32 * 2
    rest = 5 * 192 * 4 + 5 * 2 * 4 + 2 * 5 * 8
    assert config.smem_bytes == -(-(a + b + d + rest) // 1024) * 1024


def test_constants_are_the_fields_in_upper_case():
    config = CANDIDATES[-1].config
    constants = config.constants()
    for name, value in dataclasses.asdict(config).items():
        assert constants.pop(name.upper()) == value
    assert constants == {"NUM_THREADS": config.num_threads, "SMEM_BYTES": config.smem_bytes}


def test_planning_needs_neither_torch_nor_cuda():
    allowed = {"__future__", "functools", "dataclasses", "typing", "collections", "deep_gemm.types"}
    for module in (deep_gemm.plan, deep_gemm.grouped_cost):
        tree = ast.parse(Path(module.__file__).read_text())
        imported = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module == "deep_gemm":
                imported |= {f"deep_gemm.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
        assert imported <= allowed | {"deep_gemm.grouped_cost"}, module


# Grouped kernels


def grouped(kind, m, n, k, num_groups, expected_m):
    strides = k, k, n, (-(-k // 128), 1)
    return Problem(kind, m, n, k, "cuda:0", *strides, num_groups, expected_m)


@pytest.mark.parametrize(
    "m, n, k, num_groups, expected_m, block_m",
    [
        (4096, 7168, 2048, 32, 8, 64),  # decoding: weights are what takes time
        (4096, 4096, 7168, 32, 64, 128),  # as expected: often more than 64
        (32768, 4096, 7168, 4, 8192, 192),  # prefill
        (32768, 7168, 2048, 8, 4096, 192),
    ],
)
def test_known_grouped_plans(m, n, k, num_groups, expected_m, block_m):
    kind = "masked" if expected_m <= 64 else "psum"
    plan = make_plan(grouped(kind, m, n, k, num_groups, expected_m), 132)
    assert plan.kernel.block_m == block_m and plan.launch.grid == 132
    assert plan.is_b_read_once == (expected_m <= block_m)


@given(
    kind=st.sampled_from(["contiguous", "psum", "masked"]),
    m=st.integers(1, 1 << 18),
    n=st.integers(1, 1 << 12).map(lambda x: 8 * x),
    k=st.integers(1, 1 << 10).map(lambda x: 16 * x),
    num_groups=st.integers(1, 512),
    expected_m=st.integers(0, 1 << 14),
    num_sms=st.integers(1, 132) | st.sampled_from(HOPPER_SMS),
    pdl=st.booleans(),
)
def test_every_grouped_plan_fits(kind, m, n, k, num_groups, expected_m, num_sms, pdl):
    problem = grouped(kind, m, n, k, num_groups, expected_m)
    plan = make_plan(problem, num_sms, pdl)
    config, launch = plan.kernel, plan.launch
    assert config in [candidate.config for candidate in GROUPED_CANDIDATES]
    assert 0 < launch.grid <= num_sms and launch.grid % config.cluster_size == 0
    assert launch.smem_bytes == config.smem_bytes <= SMEM_LIMIT
    assert launch.cluster == config.cluster_size and launch.pdl is pdl
    assert plan.raster_m >= 1 and plan.predicted_us > 0
    # A CTA for each tile that there may be: how many there are is known on the device only.
    along_n = -(-n // (config.block_n * config.cluster_n))
    blocks = -(-m // config.block_m) * (num_groups if kind == "masked" else 1)
    assert launch.grid >= min(num_sms // config.cluster_size, blocks * along_n)


def test_a_grid_for_the_most_tiles_that_groups_can_make_of_the_rows():
    """Five rows of five groups are five tiles, of one group one."""
    config = make_config(64, 128, 1, is_grouped=True)
    for kind, m, num_groups, most in (
        ("psum", 5, 8, 6),
        ("contiguous", 640, 3, 13),
        ("masked", 65, 3, 6),
        ("masked", 1, 200, 132),
    ):
        plan = make_plan(grouped(kind, m, 128, 256, num_groups, 1), 132, config=config)
        assert plan.launch.grid == most, kind


def test_the_hint_changes_nothing_but_the_choice():
    config = make_config(128, 128, 2, is_grouped=True)
    plans = [
        make_plan(grouped("masked", 512, 2048, 256, 8, expected_m), 132, config=config)
        for expected_m in (0, 1, 512)
    ]
    assert len({plan.launch for plan in plans}) == 1
    assert [plan.is_b_read_once for plan in plans] == [True, True, False]


def test_grouped_candidates_differ_fit_and_cost_something():
    configs = [candidate.config for candidate in GROUPED_CANDIDATES]
    assert len(set(configs)) == len(configs)
    for candidate in GROUPED_CANDIDATES:
        config = candidate.config
        assert config.is_grouped and config.cluster_m == 1
        assert config.block_m + 4 <= 256, "scales of four rows more fit into a box"
        assert config.smem_bytes <= SMEM_LIMIT
        assert candidate.k_block_us > 0 and candidate.tile_us > 0


def test_smem_bytes_of_a_grouped_kernel():
    """Scales of four rows more, a multiple of 128 bytes; the queue takes one KiB."""
    config = KernelConfig(128, 128, 2, 5, slab_n=64, num_d_slabs=2, is_grouped=True)
    stages = 5 * (256 * 128 + 160 * 4 + 2 * 4 + 2 * 8)
    assert config.smem_bytes == 1024 + -(-(stages + 8 * 2 * 16 * 64 * 2) // 1024) * 1024
