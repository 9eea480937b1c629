"""The straight line of a grouped call: what is planned, remembered, by which key; the argument.

As in `test_gemm.py` and `test_launch.py`: the driver and the compiler are fakes, and CPU tensors
take the way of those on a Hopper GPU.
"""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_tools import config_id
from fake_driver import (
    MAP_D,
    MAPS_A,
    MAPS_B,
    MAPS_SFA,
    Line,
    bindings,
    install_line,
    stage_bytes,
)
from grouped_tools import (
    CONTIGUOUS,
    GROUPED_CONFIGS,
    KINDS,
    GroupedCase,
    make_case,
    with_config,
)

import deep_gemm
from deep_gemm import arguments, driver, grouped_gemm, layout
from deep_gemm.arguments import UnitCounters
from deep_gemm.jit.codegen import KERNELS
from deep_gemm.plan import GROUPED_CANDIDATES, units
from deep_gemm.types import KernelConfig

N, K = 264, 1040
SIZES = [33, 0, 130, 1]


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    return install_line(monkeypatch, grouped_gemm)


def case_of(kind: str, sizes: list[int] = SIZES, n: int = N, k: int = K, **more: Any) -> Any:
    return make_case(kind, sizes, n, k, device="cpu", **more)


def output(case: GroupedCase) -> torch.Tensor:
    return case.shaped(torch.empty(case.num_rows, case.n, dtype=torch.bfloat16))


def expected_addresses(case: GroupedCase, d: torch.Tensor) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in (case.a[0], case.b[0], case.a[1], d, case.b[1]))


# Remembered launches


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_repeats_is_looked_up(line: Line, kind: str) -> None:
    case = case_of(kind)
    d = output(case)
    for _ in range(3):
        case.call(d)
    assert len(line.planned) == len(line.loaded) == 1
    assert len({launched.args for launched in line.launched}) == 1 and len(line.launched) == 3
    assert line.addresses() == expected_addresses(case, d)
    assert line.args().rows.grouped_layout == case.layout.data_ptr()
    (name, constants) = line.loaded[0]
    assert name == "fp8_gemm_1d2d"
    assert constants in [candidate.config.constants() for candidate in GROUPED_CANDIDATES]
    assert line.launched[0].smem_bytes == constants["SMEM_BYTES"]
    assert line.launched[0].threads == constants["NUM_THREADS"]
    problem = line.planned[0]
    assert problem.kind == ("contiguous" if kind == "ids" else kind)
    assert (problem.m, problem.n, problem.k, problem.num_groups) == (case.rows, N, K, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_other_numbers_in_the_layout_change_nothing(line: Line, kind: str) -> None:
    case = case_of(kind)
    d = output(case)
    case.call(d)
    case.layout.zero_()
    case.call(d)
    assert len(line.planned) == 1
    assert line.launched[0].args == line.launched[1].args


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["a", "sfa", "b", "sfb", "d", "layout"])
def test_new_addresses_cost_no_plan_and_are_all_used(line: Line, kind: str, which: str) -> None:
    case, other = case_of(kind), case_of(kind)
    d = output(case)
    case.call(d)
    old_a, old_b, old_layout = case.a, case.b, case.layout
    encoded = len(line.fake.encoded)
    case.a = (other.a if which == "a" else old_a)[0], (other.a if which == "sfa" else old_a)[1]
    case.b = (other.b if which == "b" else old_b)[0], (other.b if which == "sfb" else old_b)[1]
    case.layout = other.layout if which == "layout" else old_layout
    other_d = output(case) if which == "d" else d
    case.call(other_d)
    assert len(line.planned) == 1 and len(line.fake.encoded) == encoded
    assert line.addresses() == expected_addresses(case, other_d) != line.addresses(0) or (
        which == "layout"
    )
    assert line.args().rows.grouped_layout == case.layout.data_ptr()
    case.a, case.b, case.layout = old_a, old_b, old_layout
    case.call(d)  # and the first launch is what it was
    assert line.launched[-1].args == line.launched[0].args
    assert len(grouped_gemm._launches) == 2 and len(grouped_gemm._templates) == 1


def test_addresses_are_checked_also_where_a_template_is_known(line: Line) -> None:
    case = case_of("ids", k=128)
    d = output(case)
    case.call(d)
    a, sfa = case.a
    buffer = torch.zeros(a.untyped_storage().nbytes() + 32, dtype=torch.uint8)
    first = -buffer.data_ptr() % 16 + 8
    unaligned = buffer[first:].view(a.dtype).as_strided(a.shape, a.stride())
    case.a = unaligned, sfa
    with pytest.raises(ValueError, match="a starts at address"):
        case.call(d)
    assert len(line.launched) == 1


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_options_are_part_of_the_key(line: Line, kind: str) -> None:
    case = case_of(kind, [128, 256], alignment=64, wild=False)
    d = output(case)
    case.call(d)
    case.call(d, ensure_zero_padding=False)
    case.alignment = 128
    case.call(d)
    case.call(d, recipe=(1, 128, 128), compiled_dims="mnk")
    assert len(grouped_gemm._templates) == len(line.launched) == 4
    rows = [line.args(i).rows for i in range(4)]
    assert [each.zero_padding for each in rows] == [1, 0, 1, 1]
    assert [each.alignment for each in rows] == [64, 64, 128, 128]
    for wrong in ({"recipe": (1, 1, 128)}, {"recipe_a": (1, 128)}, {"compiled_dims": "xyz"}):
        with pytest.raises((ValueError, NotImplementedError)):
            case.call(d, **wrong)
    assert len(line.launched) == 4


def test_one_layout_tensor_read_in_two_ways(line: Line) -> None:
    """As many groups as rows: ids and ends have the same shape."""
    case = GroupedCase("psum", 16, 16, N, K, alignment=16, device="cpu").route([16] * 16)
    d = output(case)
    case.call(d)
    case.layout.zero_()
    case.call(d, use_psum_layout=False)
    assert [line.args(i).rows.kind for i in (0, 1)] == [1, 0]


def test_hints_are_rounded_so_that_calls_share_launches(line: Line) -> None:
    case = case_of("masked", [8, 8], rows=512)
    d = output(case)
    steps = {0: 0, 1: 8, 8: 8, 9: 16, 57: 64, 64: 64, 65: 128, 128: 128, 129: 192, 10**6: 1000000}
    for expected_m in steps:
        case.call(d, expected_m=expected_m)
    hints = sorted(set(steps.values()))
    assert len(grouped_gemm._launches) == len(line.planned) == len(hints)
    assert {problem.expected_m for problem in line.planned} == {min(hint, 512) for hint in hints}

    case = case_of("psum", [8, 8])
    d = output(case)
    before = len(line.planned)
    for expected_m in (None, 3, 7, 8, 100, 128):
        case.call(d, expected_m_for_psum_layout=expected_m)
    assert len(line.planned) - before == 3


def test_a_hint_chooses_the_kernel_and_nothing_else(line: Line) -> None:
    case = case_of("masked", [8] * 8, 4096, 7168, rows=256)
    d = output(case)
    for expected_m in (1, 256):
        case.call(d, expected_m=expected_m)
    tiles = [constants["BLOCK_M"] for _, constants in line.loaded]
    assert tiles[0] == 64 < tiles[1]
    assert line.addresses(0) == line.addresses(1)
    assert line.args(0).is_b_read_once and line.args(0).shape_m == line.args(1).shape_m == 256
    for launched, problem, (_, constants) in zip(
        line.launched, line.planned, line.loaded, strict=True
    ):
        assert launched.grid == 132, "all groups may be full, whatever the hint says"
        config = next(c.config for c in GROUPED_CANDIDATES if c.config.constants() == constants)
        assert units(problem, config) >= 1


@pytest.mark.parametrize(
    "change",
    [
        lambda: deep_gemm.set_num_sms(7),
        lambda: deep_gemm.set_pdl(True),
        lambda: deep_gemm.set_backend("sm90"),
    ],
    ids=["num_sms", "pdl", "backend"],
)
def test_a_new_setting_means_a_new_plan(line: Line, change: Any) -> None:
    case = case_of("psum")
    d = output(case)
    case.call(d)
    change()
    for _ in range(2):
        case.call(d)
    assert len(line.planned) == 2
    assert line.launched[-1].pdl is deep_gemm.get_pdl()
    assert line.launched[-1].grid <= deep_gemm.get_num_sms()
    deep_gemm.set_tc_util(50)
    case.call(d)
    assert len(line.planned) == 2


def test_checks_of_values_come_before_any_memory(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of("masked")
    d = output(case)
    case.call(d)
    monkeypatch.setenv("DG_DEBUG_CHECKS", "1")
    case.layout[2] = case.rows + 1
    with pytest.raises(ValueError, match="masked_m"):
        case.call(d)
    case.layout[2] = 1
    case.call(d)
    assert len(line.launched) == 2 and len(line.planned) == 2


def test_a_launch_that_fails_is_not_remembered(line: Line) -> None:
    case = case_of("ids")
    d = output(case)
    line.fake.launch_status = bindings.CUresult.CUDA_ERROR_INVALID_VALUE
    for _ in range(2):
        with pytest.raises(driver.DriverError):
            case.call(d)
    assert not grouped_gemm._launches
    line.fake.launch_status = bindings.CUresult.CUDA_SUCCESS
    case.call(d)
    assert len(line.launched) == len(line.planned) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_transposed_scales_are_never_remembered(
    line: Line, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[torch.Tensor] = []
    native_sfa = layout.native_sfa

    def note(*rest: Any) -> torch.Tensor:
        copies.append(native_sfa(*rest))
        return copies[-1]

    monkeypatch.setattr(layout, "native_sfa", note)
    case = case_of(kind)
    d = output(case)
    case.a = case.a[0], case.a[1].contiguous()
    for i in range(3):
        case.a[1].add_(1)  # contents may change between calls
        case.call(d)
        assert line.addresses()[2] == copies[i].data_ptr()
        assert torch.equal(copies[i].nan_to_num(), case.a[1].nan_to_num())
    assert len({copy.data_ptr() for copy in copies}) == 3
    assert not grouped_gemm._launches and len(line.planned) == 1
    stride = -(-case.rows // 4) * 4 * 4
    assert line.fake.maps_of(line.launched[0])[MAPS_SFA[0]].stride_bytes == stride


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_the_other_forms_launch_the_same(line: Line, kind: str) -> None:
    case = case_of(kind)
    d = output(case)
    case.call(d)
    case.use_alignment()
    options = {"use_psum_layout": kind == "psum"}
    transposed = [each.mT for each in case.b]
    deep_gemm.m_grouped_fp8_gemm_nn_contiguous(case.a, transposed, d, case.layout, **options)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(case.a, case.b, d, m_indices=case.layout, **options)
    assert len(line.launched) == 3 and len(line.planned) == 1
    assert len({launched.args for launched in line.launched}) == 1


def test_an_explicit_config_is_not_remembered(line: Line) -> None:
    config = GROUPED_CONFIGS[-2]
    for kind in KINDS:
        case = case_of(kind)
        d = output(case)
        with_config(config)(case, d, True)
        assert line.loaded[-1] == ("fp8_gemm_1d2d", config.constants())
        assert line.args().rows.zero_padding == (kind != "masked")
    assert not grouped_gemm._launches and not grouped_gemm._templates


def test_no_rows_and_the_reference_backend_launch_nothing(line: Line) -> None:
    for kind in KINDS:
        empty = GroupedCase(kind, 3, 0, N, K, device="cpu")
        empty.call(output(empty))
        case = case_of(kind, k=256)
        d = output(case)
        case.call(d)
        launches = len(line.launched)
        deep_gemm.set_backend("reference")
        d.view(torch.int16).fill_(-1)
        case.call(d)
        case.check_rows(d.view(-1, N))
        deep_gemm.set_backend(None)
        assert len(line.launched) == launches


# The argument


def launch_of(line: Line, kind: str, config: KernelConfig, n: int, **more: Any) -> Any:
    case = case_of(kind, n=n, **more)
    d = torch.empty(case.num_rows, n + 8, dtype=torch.bfloat16)[:, :n]
    with_config(config)(case, case.shaped(d), False)
    return case, d, line.args(), line.fake.maps_of(line.launched[-1])


@pytest.mark.parametrize("config", GROUPED_CONFIGS, ids=config_id)
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_maps(line: Line, kind: str, config: KernelConfig) -> None:
    share, b_rows = config.block_m // config.cluster_n, config.block_n
    part = largest_part_box(share)
    for n in (8, 136, 520):
        case, d, args, maps = launch_of(line, kind, config, n)
        assert maps.keys() == {*MAPS_A, *MAPS_B, MAPS_SFA[0], MAP_D}
        for i, rows in zip(MAPS_A, (share, part, part // 2, part // 4), strict=True):
            assert maps[i].shape == (case.num_rows, K) and maps[i].box == (rows, 128)
        for i, rows in zip(MAPS_B, (b_rows, n % b_rows or b_rows), strict=True):
            assert maps[i].shape == (4 * n, K) and maps[i].box == (rows, 128)
        for i in (*MAPS_A, *MAPS_B):
            assert (maps[i].dtype, maps[i].swizzle) == ("UINT8", "128B")
            assert maps[i].stride_bytes == K + 32
        scales, k_blocks = maps[MAPS_SFA[0]], -(-K // 128)
        assert (scales.dtype, scales.swizzle) == ("FLOAT32", "NONE")
        assert scales.shape == ((4 if kind == "masked" else 1) * k_blocks, case.rows)
        assert scales.box == (1, config.block_m + 4), "a group begins anywhere"
        assert scales.stride_bytes == 4 * case.a[1].stride(-1)
        store = maps[MAP_D]
        assert (store.dtype, store.swizzle) == ("BFLOAT16", f"{2 * config.slab_n}B")
        assert store.shape == (case.num_rows, n) and store.box == (16, config.slab_n)
        assert store.stride_bytes == 2 * (n + 8)
        for each in maps.values():
            assert max(each.box) <= 256 and each.address % 16 == each.stride_bytes % 16 == 0
        assert line.addresses() == expected_addresses(case, d)
        assert (args.shape_m, args.shape_n, args.shape_k) == (case.rows, n, K)
        assert args.sfb_stride_group == case.b[1].stride(0)
        assert (args.sfb_stride_n, args.sfb_stride_k) == case.b[1].stride()[1:]
        assert args.d_stride == n + 8 and args.raster_m >= 1
        rows = args.rows
        assert rows.kind == KINDS.index(kind) and rows.num_groups == 4
        assert rows.shape_m == case.rows and rows.zero_padding == 0
        assert rows.grouped_layout == case.layout.data_ptr() and rows.next_unit
        assert 1 <= rows.alignment <= 128


@pytest.mark.parametrize("alignment", [1, 16, 2**40])
def test_an_alignment_fits_into_32_bits(line: Line, alignment: int) -> None:
    case = GroupedCase("psum", 1, 300, N, K, alignment=alignment, device="cpu").route([250])
    case.call(output(case))
    assert line.args().rows.alignment == min(alignment, 300)


@pytest.mark.parametrize("config", GROUPED_CONFIGS, ids=config_id)
def test_every_stage_gets_the_bytes_that_it_waits_for(line: Line, config: KernelConfig) -> None:
    """Of A, each CTA of a cluster loads the least box that its part of the rows fits into."""
    share = config.block_m // config.cluster_n
    for n in (8, 136, 520):
        *_, maps = launch_of(line, "ids", config, n)
        boxes = [maps[i].box[0] for i in MAPS_A]
        scales = maps[MAPS_SFA[0]].box[1]
        for n_idx in range(-(-n // config.block_n)):
            rows_n = min(config.block_n, n - n_idx * config.block_n)
            box_b = maps[MAPS_B[rows_n != config.block_n]].box[0]
            assert box_b == rows_n, "a box that reaches outside is slow"
            for rows in range(1, config.block_m + 1):
                parts = [max(0, min(share, rows - r * share)) for r in range(config.cluster_n)]
                loaded = sum(min(box for box in boxes if box >= part) for part in parts if part)
                expected = sum(part_box(share, part) for part in parts)
                assert rows <= loaded == expected <= config.block_m
                received = (loaded + box_b) * 128 + scales * 4
                assert received == stage_bytes(config, expected, rows_n)


def producer_text() -> str:
    return " ".join((KERNELS / "producer.cuh").read_text().split())


def largest_part_box(share: int) -> int:
    """`LARGEST` of `PartBox` in the producer: a chain of "WHOLE > x ? y :"."""
    (chain,) = re.findall(r"LARGEST = ([^;]+);", producer_text())
    *conditions, otherwise = chain.split(" : ")
    for condition in conditions:
        above, box = re.fullmatch(r"WHOLE > (\d+) \? (\d+)", condition).groups()  # type: ignore
        if share > int(above):
            return int(box)
    return int(otherwise)


def part_box(share: int, rows: int) -> int:
    """`PartBox::rows` of the producer."""
    assert (
        "for (uint32_t i = 0; i < 3; ++i) "
        "if (num_rows <= LARGEST >> i) map_idx = 1 + i, rows = LARGEST >> i; "
        "if (num_rows == 0) rows = 0;"
    ) in producer_text(), "update what follows"
    found = share
    for i in range(3):
        if rows <= largest_part_box(share) >> i:
            found = largest_part_box(share) >> i
    return found if rows else 0


# The counters that units are drawn from


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> UnitCounters:
    """Real ones, of CPU memory; `is_capturing` and `synchronised` are attributes of it."""
    made = UnitCounters()
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.is_capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    stream = SimpleNamespace(synchronize=lambda: made.synchronised.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    made.is_capturing, made.synchronised = False, []  # type: ignore[attr-defined]
    return made


def test_each_pair_of_d_and_layout_has_a_counter_of_its_own(counters: UnitCounters) -> None:
    pairs = [(0, 16, 4), (0, 32, 4), (0, 16, 8), (1, 16, 4)]
    found = [counters.address(*pair) for pair in pairs]
    assert len(set(found)) == 4 and all(address % 4 == 0 and address for address in found)
    assert [counters.address(*pair) for pair in pairs] == found
    kept = counters._kept
    assert len(kept) == len(counters.synchronised) == 2, "one block of memory for each device"
    for (device, *_), address in zip(pairs, found, strict=True):
        first = kept[device].data_ptr()
        assert first <= address < first + kept[device].nbytes
        assert not kept[device].any()


def test_there_is_no_counter_where_all_are_taken(
    counters: UnitCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UnitCounters, "COUNT", 3)
    found = [counters.address(0, d, 4) for d in range(16, 96, 16)]
    assert len(set(found[:3])) == 3 and found[3:] == [0, 0]
    assert [counters.address(0, d, 4) for d in range(16, 96, 16)] == found


def test_no_memory_is_taken_while_a_graph_is_captured(counters: UnitCounters) -> None:
    counters.is_capturing = True  # type: ignore[attr-defined]
    assert counters.address(0, 16, 4) == 0 and not counters._kept
    counters.is_capturing = False  # type: ignore[attr-defined]
    first = counters.address(0, 16, 4)
    counters.is_capturing = True  # type: ignore[attr-defined]
    assert first and counters.address(0, 16, 4) == first
    assert counters.address(0, 32, 4) not in (0, first), "memory that is there does last"
    assert counters.address(1, 32, 4) == 0


def test_launches_find_the_counter_of_their_pair(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, other = case_of("ids"), case_of("ids")
    d, other_d = output(case), output(case)
    case.call(d)
    case.call(other_d)
    case.layout = other.layout
    case.call(d)
    used = [line.args(i).rows.next_unit for i in range(3)]
    assert len(set(used)) == 3 and 0 not in used
    monkeypatch.setattr(arguments.unit_counters, "COUNT", 3)
    case.call(other_d)
    assert line.args().rows.next_unit == 0
