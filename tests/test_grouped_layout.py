"""Routing: the PyTorch operations and the kernel itself against loops that spell out the rules.

There is no GPU here, so the kernel's text is compiled by g++: threads of a CTA are fibers that take
turns, in any order, at barriers and where a warp exchanges values.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from deep_gemm import driver, grouped_layout, jit, launch
from deep_gemm.config import settings
from deep_gemm.grouped_gemm import m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked
from deep_gemm.grouped_layout import MAX_EXPERTS, GroupedLayout, build_grouped_layout
from deep_gemm.jit import codegen, cubin
from deep_gemm.quantize import per_block_cast_to_fp8, per_token_cast_to_fp8

pytest_plugins = ["jit_fixtures"]

NUM_THREADS = 96  # of a CTA of fibers
HARNESS = """
#include <ucontext.h>
#include <vector>
#define __host__
#define __device__
#define __shared__ static
struct Index { unsigned x; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    unsigned waits_for;  // 0: nothing, 1: its warp, 2: the CTA
    bool is_done;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned current;
static unsigned exchanged[2][1024], num_exchanges[1024];
static Index blockIdx, gridDim;
#define threadIdx Index{current}

static void wait_for(unsigned what) {
    fibers[current].waits_for = what;
    swapcontext(&fibers[current].context, &scheduler);
}
static void __syncthreads() { wait_for(2); }
static void __syncwarp() { wait_for(1); }
// What the lanes of this warp bring. Two buffers: nobody writes the one that others still read.
static const unsigned* exchange(unsigned value) {
    unsigned* values = exchanged[num_exchanges[current]++ % 2];
    values[current] = value;
    wait_for(1);
    return values + current / 32 * 32;
}
static unsigned __match_any_sync(unsigned, unsigned value) {
    const unsigned* values = exchange(value);
    unsigned mask = 0;
    for (int i = 0; i < 32; ++i) mask |= unsigned(values[i] == value) << i;
    return mask;
}
static unsigned __shfl_up_sync(unsigned, unsigned value, unsigned distance) {
    const unsigned lane = current % 32, *values = exchange(value);
    return values[lane < distance ? lane : lane - distance];
}
static unsigned __shfl_sync(unsigned, unsigned value, unsigned lane) {
    return exchange(value)[lane];
}
static unsigned __ballot_sync(unsigned, bool value) {
    const unsigned* values = exchange(value);
    unsigned mask = 0;
    for (int i = 0; i < 32; ++i) mask |= values[i] << i;
    return mask;
}
template <class T> T __ldg(const T* address) { return *address; }
static unsigned __popc(unsigned mask) { return __builtin_popcount(mask); }
static int __ffs(unsigned mask) { return __builtin_ffs(mask); }
static int __clz(unsigned mask) { return __builtin_clz(mask); }
static unsigned atomicAdd(unsigned* address, unsigned value) {
    return (*address += value) - value;
}
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
#include "group_rows.cuh"

template <int BYTES> struct Config {
    static constexpr int NUM_THREADS = THREADS, MAX_EXPERTS = 4096, ID_BYTES = BYTES;
};
static group_rows_args args;
template <int BYTES> void thread() {
    group_rows_body<Config<BYTES>>(args);
    fibers[current].is_done = true;
    swapcontext(&fibers[current].context, &scheduler);
}
// If these threads all wait for `what`, they need not any more.
static void release(unsigned begin, unsigned count, unsigned what) {
    for (unsigned i = begin; i < begin + count; ++i) {
        if (fibers[i].is_done || fibers[i].waits_for != what) return;
    }
    for (unsigned i = begin; i < begin + count; ++i) fibers[i].waits_for = 0;
}
// Of the threads that can run, it is always the first of `order` that does: so the first warps are
// far ahead of the others. Returns 1 if threads wait for each other in vain, else 0.
static int run_cta(void (*function)(), const unsigned* order) {
    fibers.resize(THREADS);
    for (unsigned i = 0; i < THREADS; ++i) {
        Fiber& fiber = fibers[i];
        fiber.stack.resize(65536), fiber.waits_for = 0, fiber.is_done = false, num_exchanges[i] = 0;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, function, 0);
    }
    unsigned num_done = 0;
    while (num_done < THREADS) {
        unsigned i = 0;
        while (i < THREADS && (fibers[order[i]].is_done || fibers[order[i]].waits_for != 0)) ++i;
        if (i == THREADS) return 1;
        current = order[i];
        swapcontext(&scheduler, &fibers[current].context);
        num_done += fibers[current].is_done;
        release(current / 32 * 32, 32, 1);
        release(0, THREADS, 2);
    }
    return 0;
}
extern "C" unsigned size_of_args() { return sizeof(group_rows_args); }
extern "C" int run(const void* bytes, int id_bytes, unsigned grid, const unsigned* order) {
    args = *static_cast<const group_rows_args*>(bytes);
    gridDim.x = grid;
    for (unsigned i = grid; i-- > 0;) {  // the last first: nobody waits for another CTA
        blockIdx.x = i;
        if (run_cta(id_bytes == 8 ? thread<8> : thread<4>, order)) return 1;
    }
    return 0;
}
"""


class Gpu:
    """Takes the place of `launch.run`; `order` is that in which threads run between barriers."""

    def __init__(self, folder: Path, kernels: Path = codegen.KERNELS) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "harness.cpp").write_text(HARNESS)
        compiler = shutil.which("g++")
        assert compiler is not None
        command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas"]
        command += ["-Wno-unused-function", "-Wno-sign-compare", f"-DTHREADS={NUM_THREADS}"]
        command += ["-shared", "-fPIC", f"-I{kernels}"]
        subprocess.run([*command, "harness.cpp", "-o", "harness.so"], cwd=folder, check=True)
        self.library = ctypes.CDLL(str(folder / "harness.so"))
        self.order = list(range(NUM_THREADS))
        self.grids: list[int] = []

    def run(self, kernel: dict[str, int], config: Any, args: ctypes.Structure, _: Any) -> None:
        assert config.threads == kernel["NUM_THREADS"] == NUM_THREADS
        assert config.smem_bytes == 0 and config.cluster == 1
        order = (ctypes.c_uint32 * NUM_THREADS)(*self.order)
        is_stuck = self.library.run(ctypes.byref(args), kernel["ID_BYTES"], config.grid, order)
        if is_stuck:
            raise RuntimeError("threads wait for each other in vain")
        self.grids.append(config.grid)

    def build(self, *args: Any, num_sms: int = 4, **options: Any) -> GroupedLayout:
        """`build_grouped_layout` by the kernel, on a GPU of that size."""
        with pytest.MonkeyPatch.context() as patch, guarded_outputs(patch):
            patch.setattr(launch, "run", self.run)
            patch.setattr(jit, "load_kernel", lambda _, constants: constants)
            patch.setattr(driver, "device_properties", lambda _: (num_sms, (9, 0)))
            patch.setattr(grouped_layout, "_NUM_THREADS", NUM_THREADS)
            patch.setattr(grouped_layout, "_has_kernel", lambda _: True)
            return build_grouped_layout(*args, **options)


@contextmanager
def guarded_outputs(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is allocated starts as garbage, and nothing is written on either side of it."""
    buffers: list[torch.Tensor] = []

    def empty(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        numel = math.prod(shape)
        buffers.append(torch.full((numel + 128,), -77, **options))
        return buffers[-1][64 : 64 + numel].view(shape)

    patch.setattr(torch, "empty", empty)
    yield
    assert all((side == -77).all() for b in buffers for side in (b[:64], b[-64:]))


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Gpu:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: the kernel cannot be compiled for the CPU")
    return Gpu(tmp_path_factory.mktemp("group_rows"))


def expected_rows(
    slots: list[int],
    num_experts: int,
    layout: str,
    alignment: int,
    num_rows: int,
    m_max: int,
) -> tuple[list[int], list[int], list[int]]:
    """grouped_layout, row_of_slot and slot_of_row, one by one."""
    row_of_slot = [-1] * len(slots)
    slot_of_row, ids, ends, counts = [-1] * num_rows, [-1] * num_rows, [], []
    begin = 0
    for expert in range(num_experts):
        if layout == "masked":
            begin = expert * m_max
        elif begin % alignment:
            begin += alignment - begin % alignment
        limit = begin + m_max if layout == "masked" else num_rows
        for slot, chosen in enumerate(slots):
            if chosen != expert:
                continue
            if begin < limit:
                row_of_slot[slot], slot_of_row[begin], ids[begin] = begin, slot, expert
            begin += 1
        ends.append(min(begin, limit))
        counts.append(min(begin, limit) - expert * m_max)
    return {"psum": ends, "contiguous": ids, "masked": counts}[layout], row_of_slot, slot_of_row


def check(built: GroupedLayout, ids: torch.Tensor, num_experts: int) -> None:
    """`built` is what the loops say, in the promised form."""
    m_max = built.rows_shape[1] if built.layout == "masked" else 0
    expected = expected_rows(
        ids.flatten().tolist(), num_experts, built.layout, built.alignment, built.num_rows, m_max
    )
    shape = (len(ids), 1) if ids.dim() == 1 else tuple(ids.shape)
    for tensor, values in zip(
        (built.grouped_layout, built.row_of_slot, built.slot_of_row), expected, strict=True
    ):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous() and tensor.device == ids.device
        assert tensor.flatten().tolist() == values
    assert tuple(built.row_of_slot.shape) == shape
    assert built.slot_of_row.dim() == built.grouped_layout.dim() == 1


def is_equal(built: GroupedLayout, other: GroupedLayout) -> bool:
    names = ("grouped_layout", "row_of_slot", "slot_of_row")
    return all(torch.equal(getattr(built, name), getattr(other, name)) for name in names)


@st.composite
def calls(draw: st.DrawFn, max_slots: int = 200) -> tuple[torch.Tensor, int, dict[str, Any]]:
    """Ids, experts and options of a call."""
    num_experts = draw(st.sampled_from([1, 2, 3, 8, 31, 32, 97, 256, 300]))
    topk = draw(st.sampled_from([1, 2, 3, 8]))
    tokens = draw(st.integers(0, max_slots // topk))
    generator = random.Random(draw(st.integers(0, 2**32)))
    few = generator.sample(range(num_experts), min(num_experts, 2))
    chosen = {
        "any": lambda: generator.randrange(num_experts),
        "one": lambda: few[0],
        "few": lambda: generator.choice(few),
        "dropped": lambda: generator.choice([-1, -1, few[-1]]),
        "none": lambda: -1,
        "wild": lambda: generator.choice([-(2**31), -1, 0, num_experts, 2**31 - 1]),
    }[draw(st.sampled_from(["any", "one", "few", "dropped", "none", "wild"]))]
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    slots = [[chosen() for _ in range(topk)] for _ in range(tokens)]
    ids = torch.tensor(slots, dtype=dtype).reshape(tokens, topk)
    if dtype == torch.int64 and draw(st.booleans()):
        ids = torch.where(ids < 0, 2**32 + ids + 1, ids)  # the low word alone looks like an expert
    if topk == 1 and draw(st.booleans()):
        ids = ids.flatten()
    options: dict[str, Any] = {"layout": draw(st.sampled_from(["psum", "contiguous", "masked"]))}
    if options["layout"] == "masked":
        options["m_max"] = draw(st.sampled_from([None, 0, 1, 5, 40]))
    else:
        options["alignment"] = draw(st.sampled_from([None, 1, 3, 16, 128]))
        options["num_rows"] = draw(st.sampled_from([None, None, 0, 1, 40, 130, 1000]))
    return ids, num_experts, options


@given(call=calls())
def test_operations(call: tuple[torch.Tensor, int, dict[str, Any]]) -> None:
    ids, num_experts, options = call
    check(build_grouped_layout(ids, num_experts, **options), ids, num_experts)


@given(call=calls(), num_sms=st.integers(1, 5), seed=st.integers(0, 2**32))
@example(call=(torch.arange(200).reshape(-1, 1) % 3, 3, {}), num_sms=3, seed=0)
def test_kernel(
    gpu: Gpu, call: tuple[torch.Tensor, int, dict[str, Any]], num_sms: int, seed: int
) -> None:
    ids, num_experts, options = call
    random.Random(seed).shuffle(gpu.order)
    check(gpu.build(ids, num_experts, **options, num_sms=num_sms), ids, num_experts)


@pytest.mark.parametrize("layout", ["psum", "contiguous", "masked"])
@pytest.mark.parametrize("num_experts", [95, 96, 97, MAX_EXPERTS])
def test_kernel_with_many_slots_and_experts(gpu: Gpu, layout: Any, num_experts: int) -> None:
    """Several batches of slots for each thread, and several experts."""
    ids = torch.randint(-1, num_experts, (400, 4), generator=torch.Generator().manual_seed(0))
    options = {"m_max": 3} if layout == "masked" else {"alignment": 8, "num_rows": 5000}
    built = gpu.build(ids, num_experts, layout, num_sms=3, **options)
    operations = build_grouped_layout(ids, num_experts, layout, **options)
    assert is_equal(built, operations)


def test_arguments_are_those_of_the_kernel(gpu: Gpu) -> None:
    assert gpu.library.size_of_args() == ctypes.sizeof(grouped_layout._Args)
    text = (codegen.KERNELS / "group_rows.cuh").read_text()
    members = re.search(r"struct group_rows_args \{(.*?)\n\};", text, re.DOTALL)
    assert members is not None
    declared = re.findall(r"(\w+);", re.sub(r"//.*", "", members[1]))
    assert declared == [name for name, _ in grouped_layout._Args._fields_]


@pytest.mark.parametrize("barrier", range(6))
def test_every_barrier_is_needed(gpu: Gpu, barrier: int, tmp_path: Path) -> None:
    """Without one of them, some order of threads gives another result: so the fibers are a test."""
    shutil.copytree(codegen.KERNELS, tmp_path / "kernels")
    path = tmp_path / "kernels" / "group_rows.cuh"
    parts = re.split(r"(__sync\w+\(\);)", path.read_text())
    assert len(parts) == 2 * 6 + 1
    removed = parts.pop(2 * barrier + 1)
    path.write_text("".join(parts))
    broken = Gpu(tmp_path / "build", tmp_path / "kernels")
    ids = torch.randint(0, 40, (130, 2), generator=torch.Generator().manual_seed(0))
    expected = build_grouped_layout(ids, 40)
    results = []
    for order in (1, -1):
        broken.order = list(range(NUM_THREADS))[::order]
        broken.build(ids[:9] + 1, 60, num_sms=1)  # leaves other numbers in shared memory
        results.append(is_equal(broken.build(ids, 40, num_sms=1), expected))
    # The last one orders memory of a warp, whose lanes the next exchange keeps together anyway.
    assert all(results) == (barrier == 5), removed


@pytest.mark.parametrize("id_bytes", [4, 8])
def test_kernel_compiles_without_spills(id_bytes: int, cache_dir: Path) -> None:
    constants = {"NUM_THREADS": 512, "MAX_EXPERTS": MAX_EXPERTS, "ID_BYTES": id_bytes}
    code = jit.build("group_rows", constants)
    resources = cubin.kernels(code)["group_rows"]
    assert resources.frame_bytes == 0
    assert resources.registers <= 64
    if cubin._nvdisasm() is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    sass = cubin.disassemble(code)
    counts = cubin.opcode_counts(sass)
    assert not counts["LDL"] and not counts["STL"]
    assert counts["ATOMS"] == len(re.findall(r"ATOMS\.POPC\.INC", sass)) == 8, "of a warp at once"
    assert not counts["ATOMG"] and not counts["RED"], "their order might show"
    first = [match[0] for match in re.finditer("LDG|ATOMS", sass)][:8]
    assert first == ["LDG"] * 8, "loads are in flight together"


# Sizes


@pytest.mark.parametrize("num_experts, slots, alignment", [(4, 3, 128), (3, 10, 4), (5, 5, 1)])
def test_default_rows_are_as_many_as_choices_can_need(
    num_experts: int, slots: int, alignment: int
) -> None:
    """Neither fewer nor more: counted over all choices."""
    most = 0
    for code in range((num_experts + 1) ** min(slots, 4)):  # the other slots: expert 0
        ids = [code // (num_experts + 1) ** i % (num_experts + 1) - 1 for i in range(min(slots, 4))]
        counts = [(ids + [0] * (slots - len(ids))).count(e) for e in range(num_experts)]
        most = max(most, sum(-(-count // alignment) * alignment for count in counts))
    ids = torch.zeros(slots, 1, dtype=torch.int32)
    for layout in ("psum", "contiguous"):
        assert build_grouped_layout(ids, num_experts, layout, alignment=alignment).num_rows == most


def test_sizes_that_follow_from_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.zeros(10, 2, dtype=torch.int32)
    built = build_grouped_layout(ids, 4)
    assert (built.layout, built.alignment, built.num_rows) == ("psum", 128, 20 + 4 * 127 - 16)
    assert built.rows_shape == (built.num_rows,)
    monkeypatch.setattr(settings, "mk_alignment", 16)
    assert build_grouped_layout(ids, 4).alignment == 16
    assert build_grouped_layout(ids, 4, alignment=1).num_rows == 20
    assert build_grouped_layout(ids, 4, "masked").rows_shape == (4, 10)
    assert build_grouped_layout(ids, 4, "masked", m_max=3).num_rows == 12


def test_ctas(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.zeros(100, 2, dtype=torch.int32)
    gpu.grids.clear()
    gpu.build(ids, 4, alignment=1, num_sms=132)  # 200 slots
    gpu.build(ids, 4, num_rows=10_000, num_sms=132)  # many rows
    gpu.build(ids, 4, num_sms=2)
    gpu.build(ids[:0], 4)
    monkeypatch.setattr(settings, "num_sms", 3)
    gpu.build(ids, 4, num_sms=132)
    assert gpu.grids == [7, 27, 2, 1, 3]


def test_strided_ids_are_read_in_their_order(gpu: Gpu) -> None:
    wide = torch.arange(60).reshape(10, 6) % 4
    for ids in (wide[:, ::2], wide.t(), wide[::3], wide[3]):
        check(build_grouped_layout(ids, 4), ids, 4)
        check(gpu.build(ids, 4), ids, 4)


def test_layout_is_frozen() -> None:
    built = build_grouped_layout(torch.zeros(1, dtype=torch.int64), 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.num_rows = 3  # type: ignore[misc]


# gather and scatter

LAYOUTS: list[dict[str, Any]] = [
    {"layout": "psum", "alignment": 1},
    {"layout": "psum", "alignment": 16},
    {"layout": "contiguous", "alignment": 16},
    {"layout": "contiguous", "alignment": 16, "num_rows": 24},
    {"layout": "masked"},
    {"layout": "masked", "m_max": 2},
]
layouts = pytest.mark.parametrize("options", LAYOUTS, ids=str)


def some_ids(tokens: int = 13, num_experts: int = 5, topk: int = 3) -> torch.Tensor:
    torch.manual_seed(0)
    ids = torch.rand(tokens, num_experts).topk(topk).indices
    return ids.masked_fill(torch.rand(ids.shape) < 0.2, -1)


@layouts
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str
)
def test_gather(options: dict[str, Any], dtype: torch.dtype) -> None:
    built = build_grouped_layout(some_ids(), 5, **options)
    x = torch.randn(13, 32).mul(9).to(dtype)
    rows = built.gather(x)
    assert rows.dtype == dtype and rows.is_contiguous()
    assert tuple(rows.shape) == (*built.rows_shape, 32)
    for row, slot in zip(rows.float().reshape(-1, 32), built.slot_of_row.tolist(), strict=True):
        assert torch.equal(row, x[slot // 3].float() if slot >= 0 else torch.zeros(32))


def test_gathered_scales_keep_the_layout_that_the_kernels_load() -> None:
    _, sf = per_token_cast_to_fp8(torch.randn(13, 512))
    built = build_grouped_layout(some_ids(), 5, alignment=16)
    rows = built.gather(sf)
    assert rows.stride() == (1, built.num_rows)
    assert torch.equal(rows, built.gather(sf.contiguous()))
    small = sf.to(torch.float8_e5m2)
    assert torch.equal(built.gather(small).float(), built.gather(small.float()))


@layouts
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_weighted", [True, False])
def test_scatter(options: dict[str, Any], dtype: torch.dtype, is_weighted: bool) -> None:
    built = build_grouped_layout(some_ids(), 5, **options)
    d = torch.randn(*built.rows_shape, 24, dtype=torch.float64).to(dtype)
    d.view(-1, 24)[built.slot_of_row < 0] = torch.nan
    weights = torch.rand(13, 3).masked_fill(built.row_of_slot < 0, torch.nan)
    y = built.scatter(d, weights if is_weighted else None)
    assert y.dtype == dtype
    expected = torch.zeros(13, 24, dtype=torch.float64)
    for token, rows in enumerate(built.row_of_slot.tolist()):
        for j, row in enumerate(rows):
            if row >= 0:
                weight = weights[token, j].double() if is_weighted else 1
                expected[token] += d.view(-1, 24)[row].double() * weight
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def test_one_choice_per_token() -> None:
    built = build_grouped_layout(torch.tensor([1, 0, -1, 1]), 2, alignment=1)
    assert built.row_of_slot.tolist() == [[1], [0], [-1], [2]]
    x = torch.randn(4, 8)
    y = built.scatter(built.gather(x), torch.full((4,), 2.0))
    assert torch.equal(y, (2 * x).index_fill(0, torch.tensor([2]), 0))


@pytest.mark.parametrize("shape", [(0, 3), (5, 0)])
@layouts
def test_nothing_to_route(gpu: Gpu, shape: tuple[int, int], options: dict[str, Any]) -> None:
    ids = torch.zeros(shape, dtype=torch.int32)
    for build in (build_grouped_layout, gpu.build):
        built = build(ids, 5, **options)
        check(built, ids, 5)
        rows = built.gather(torch.randn(shape[0], 16))
        assert tuple(rows.shape) == (*built.rows_shape, 16) and not rows.any()
        y = built.scatter(rows)
        assert tuple(y.shape) == (shape[0], 16) and not y.any()


def test_no_rows() -> None:
    built = build_grouped_layout(some_ids(), 5, num_rows=0)
    assert tuple(built.gather(torch.randn(13, 8)).shape) == (0, 8)
    assert not built.scatter(torch.randn(0, 8)).any()


def test_gradients() -> None:
    built = build_grouped_layout(some_ids(), 5, alignment=16)
    x = torch.randn(13, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(13, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: built.scatter(built.gather(x), w), (x, weights))


@layouts
def test_experts_of_a_layer(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantise, route, multiply, sum: each token gets its own experts, in every layout."""
    built = build_grouped_layout(some_ids(), 5, **options)
    q, sf = per_token_cast_to_fp8(torch.randn(13, 256))
    weights = [per_block_cast_to_fp8(torch.randn(128, 256)) for _ in range(5)]
    b = (torch.stack([w for w, _ in weights]), torch.stack([s for _, s in weights]))
    a = (built.gather(q), built.gather(sf))
    d = torch.full((*built.rows_shape, 128), torch.nan, dtype=torch.bfloat16)
    if built.layout == "masked":
        m_grouped_fp8_gemm_nt_masked(a, b, d, built.grouped_layout, 8)
    else:
        monkeypatch.setattr(settings, "mk_alignment", built.alignment)
        use_psum = built.layout == "psum"
        m_grouped_fp8_gemm_nt_contiguous(a, b, d, built.grouped_layout, use_psum_layout=use_psum)
    y = built.scatter(d)
    x = q.double() * sf.double().repeat_interleave(128, 1)
    expected = torch.zeros(13, 128, dtype=torch.float64)
    for token, (experts, rows) in enumerate(
        zip(some_ids().tolist(), built.row_of_slot.tolist(), strict=True)
    ):
        for expert, row in zip(experts, rows, strict=True):
            if row >= 0:
                scale = b[1][expert].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
                expected[token] += x[token] @ (b[0][expert].double() * scale).T
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=0.2)


# Errors

IDS = torch.zeros(4, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"topk_ids": [1, 2]}, TypeError, "topk_ids is a list, expected a torch.Tensor"),
        ({"topk_ids": IDS.short()}, TypeError, "topk_ids has dtype torch.int16, expected"),
        ({"topk_ids": IDS.float()}, TypeError, "topk_ids.int()"),
        ({"topk_ids": IDS[None]}, ValueError, "topk_ids has shape (1, 4, 2), expected"),
        ({"topk_ids": IDS[0, 0]}, ValueError, "topk_ids has shape (), expected"),
        ({"num_experts": 0}, ValueError, "num_experts is 0, expected 1 to 4096"),
        ({"num_experts": 4097}, ValueError, "num_experts is 4097, expected 1 to 4096"),
        ({"num_experts": 2.0}, TypeError, "num_experts is 2.0, expected an int"),
        ({"num_experts": True}, TypeError, "num_experts is True, expected an int"),
        ({"layout": "dense"}, ValueError, "layout is 'dense', expected one of psum, contiguous"),
        ({"alignment": 0}, ValueError, "alignment is 0, expected 1 to"),
        ({"alignment": 16.0}, TypeError, "alignment is 16.0, expected an int"),
        ({"alignment": 2**29}, ValueError, "expected below 2**31; choose a smaller alignment"),
        ({"num_rows": -1}, ValueError, "num_rows is -1, expected 0 to"),
        ({"num_rows": "9"}, TypeError, "num_rows is '9', expected an int"),
        ({"m_max": 3}, ValueError, "m_max is 3, expected None with layout 'psum'; see num_rows"),
        ({"layout": "masked", "num_rows": 3}, ValueError, "num_rows is 3, expected None with"),
        ({"layout": "masked", "alignment": 16}, ValueError, "alignment is 16, expected None with"),
        ({"layout": "masked", "m_max": -1}, ValueError, "m_max is -1, expected 0 to"),
        ({"layout": "masked", "m_max": 2**28}, ValueError, "experts * m_max is below 2**31"),
    ],
    ids=str,
)
def test_errors(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        build_grouped_layout(**({"topk_ids": IDS, "num_experts": 8} | arguments))
    assert text in str(caught.value)


def test_errors_of_gather_and_scatter() -> None:
    built = build_grouped_layout(IDS, 8, alignment=1)
    with pytest.raises(ValueError, match=r"x has shape \(3, 8\), expected \(4, width\)"):
        built.gather(torch.zeros(3, 8))
    with pytest.raises(ValueError, match=r"x has shape \(4,\)"):
        built.gather(torch.zeros(4))
    with pytest.raises(ValueError, match=r"d has shape \(7, 8\), expected \(8, width\)"):
        built.scatter(torch.zeros(7, 8))
    with pytest.raises(ValueError, match=r"weights has shape \(2, 4\), expected \(4, 2\)"):
        built.scatter(torch.zeros(8, 8), torch.zeros(2, 4))
    masked = build_grouped_layout(IDS, 8, "masked")
    with pytest.raises(ValueError, match=r"expected \(8, 4, width\)"):
        masked.scatter(torch.zeros(32, 8))


def test_other_devices_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="set_backend"):
        build_grouped_layout(IDS.to("meta"), 8)
