"""What a launch hands to the driver: attributes, the argument's bytes, every tensor map and box."""

import ctypes
import re
import threading

import pytest
import torch
from dense_tools import CONFIGS, config_id, make_operands
from fake_driver import (
    ARGS_BYTES,
    MAP_D,
    MAPS_A,
    MAPS_B,
    MAPS_SFA,
    NUM_TENSOR_MAPS,
    SUCCESS,
    FakeKernel,
    bindings,
    install,
    stage_bytes,
)

from deep_gemm import checks, driver, launch, plan
from deep_gemm.arguments import KernelArgs, Operands, make_template
from deep_gemm.jit.codegen import KERNELS
from deep_gemm.tensor_map import make_tensor_map
from deep_gemm.types import LaunchConfig

SIZES_OF_TYPES = {"TensorMap": (128, 128), "uint32_t": (4, 4)}  # and pointers: (8, 8)

# m and n with tails of one, of a wave, of almost a tile; tiles inside, at and beyond the edge
SIZES = [(1, 8), (3, 24), (64, 128), (97, 136), (193, 392), (255, 520), (4097, 2112)]


@pytest.fixture
def fake(monkeypatch):
    return install(monkeypatch)


def make_launch(fake, kernel=None, device=0, **changes):
    values = {"grid": 6, "threads": 384, "smem_bytes": 200_000} | changes
    args = KernelArgs.from_buffer_copy(bytes(range(128)) * (ARGS_BYTES // 128))
    return launch.Launch(kernel or FakeKernel(), LaunchConfig(**values), args, device), args


# The launch


def test_a_plain_launch(fake):
    kernel = FakeKernel()
    run, args = make_launch(fake, kernel)
    run()
    (launched,) = fake.launched
    assert (launched.grid, launched.threads, launched.smem_bytes) == (6, 384, 200_000)
    assert launched.stream == 7 and launched.handle is kernel.handle
    assert launched.cluster is None and not launched.pdl
    assert launched.args == bytes(args)
    assert kernel.max_smem == [(200_000, 0)]


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("pdl", [False, True])
def test_attributes(fake, cluster, pdl):
    make_launch(fake, cluster=cluster, pdl=pdl)[0]()
    (launched,) = fake.launched
    assert launched.cluster == (2 if cluster == 2 else None)
    assert launched.pdl is pdl


def test_little_shared_memory_needs_no_permission(fake):
    kernel = FakeKernel()
    make_launch(fake, kernel, smem_bytes=48 * 1024)[0]()
    assert kernel.max_smem == []


def test_the_stream_is_asked_for_at_every_call(fake, monkeypatch):
    run, _ = make_launch(fake)
    run()
    monkeypatch.setattr("torch._C._cuda_getCurrentRawStream", lambda index: 9, raising=False)
    run()
    run()
    assert [launched.stream for launched in fake.launched] == [7, 9, 9]


def test_the_argument_outlives_the_caller(fake):
    run, args = make_launch(fake)
    expected = bytes(args)
    del args
    other = run.with_args(KernelArgs(shape_m=99))
    run(), other()
    assert fake.launched[0].args == expected
    assert fake.launched[1].args == bytes(KernelArgs(shape_m=99))


def test_the_context_of_the_device_is_made_current_and_given_back(fake):
    run, _ = make_launch(fake, device=1)  # context 2, while 1 is current
    run()
    assert fake.launched[0].contexts == [1, 2] and fake.contexts == [1]
    fake.launch_status = bindings.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(driver.DriverError):
        run()
    assert fake.contexts == [1]


def test_a_thread_without_a_context(fake):
    run, _ = make_launch(fake)
    fake.contexts = [0]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(fake.launched) == 1 and fake.contexts == [0]


def test_a_refused_launch_is_an_error(fake):
    fake.launch_status = bindings.CUresult.CUDA_ERROR_INVALID_VALUE
    text = r"cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE \(a description\)"
    with pytest.raises(driver.DriverError, match=text):
        make_launch(fake)[0]()


def test_check_unpacks():
    assert driver.check((SUCCESS,), "a") is None
    assert driver.check((SUCCESS, 5), "a") == 5
    assert driver.check((SUCCESS, 5, 6), "a") == (5, 6)


def test_a_missing_driver_is_named(monkeypatch):
    def fail(flags):
        raise RuntimeError("libcuda.so.1: no such file")

    monkeypatch.setattr(bindings, "cuInit", fail)
    with pytest.raises(driver.DriverError, match=r"libcuda\.so\.1\) cannot be loaded"):
        driver.api.__wrapped__()


# The argument


def struct_members(file, struct):
    """(name, offset, size) of the members of a struct, then (None, size, alignment)."""
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", (KERNELS / file).read_text(), re.DOTALL)[1]
    body = re.sub(r"//.*", "", body)
    offset = largest = 0
    members = []
    for declaration in filter(None, (" ".join(part.split()) for part in body.split(";"))):
        kind, name, count = re.fullmatch(r"(.*?)[ ](\w+)(?:\[(\d+)\])?", declaration).groups()
        if kind == "GroupedRows":
            size, alignment = struct_members("grouped_scheduler.cuh", kind)[-1][1:]
        else:
            size, alignment = (8, 8) if kind.endswith("*") else SIZES_OF_TYPES[kind]
        offset = -(-offset // alignment) * alignment
        members.append((name, offset, size * int(count or 1)))
        offset = members[-1][1] + members[-1][2]
        largest = max(largest, alignment)
    return [*members, (None, -(-offset // largest) * largest, largest)]


def assert_same_layout(structure, members):
    fields = [name for name, *_ in structure._fields_ if not name.startswith("_")]
    assert fields == [name for name, _, _ in members]
    for name, offset, member_size in members:
        field = getattr(structure, name)
        assert (field.offset, field.size) == (offset, member_size), name


def test_the_argument_is_laid_out_as_the_kernel_reads_it():
    *members, (_, size, _) = struct_members("arguments.cuh", "fp8_gemm_1d2d_args")
    assert ctypes.sizeof(KernelArgs) == size == ARGS_BYTES
    maps = [member for member in members if member[0].startswith("tensor_map_")]
    places = {
        name: range(offset // 128, (offset + size) // 128) if size > 128 else offset // 128
        for name, offset, size in maps
    }
    assert places == {
        "tensor_map_a": MAPS_A,
        "tensor_map_b": MAPS_B,
        "tensor_map_sfa": MAPS_SFA,
        "tensor_map_d": MAP_D,
    }
    assert KernelArgs._tensor_maps.offset == 0
    assert KernelArgs._tensor_maps.size == sum(size for _, _, size in maps)
    assert KernelArgs._tensor_maps.size == NUM_TENSOR_MAPS * 128
    assert_same_layout(KernelArgs, [member for member in members if member not in maps])


def test_the_rows_of_groups_are_laid_out_as_the_kernel_reads_them():
    *members, (_, size, _) = struct_members("grouped_scheduler.cuh", "GroupedRows")
    structure = dict(KernelArgs._fields_)["rows"]
    assert ctypes.sizeof(structure) == size
    assert_same_layout(structure, members)


def make_dense_launch(operands, d, config):
    problem = checks.check_dense(*operands, d)
    gemm_plan = plan.make_plan(problem, 132, config=config)
    tensors = Operands(*operands.a, *operands.b, d)
    return make_template(FakeKernel(), problem, gemm_plan, tensors, 0).at(tensors)


def arguments(fake, m, n, k, config):
    """(operands, D, the argument, its tensor maps) of one launch."""
    operands = make_operands(m, n, k, device="cpu")
    d = torch.empty(m, n + 8, dtype=torch.bfloat16)[:, :n]
    make_dense_launch(operands, d, config)()
    launched = fake.launched[-1]
    return operands, d, KernelArgs.from_buffer_copy(launched.args), fake.maps_of(launched)


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_tensor_maps(fake, config):
    a_rows, b_rows = config.block_m // config.cluster_n, config.block_n // config.cluster_m
    for m, n in SIZES:
        k = 1040
        (a, b), d, args, maps = arguments(fake, m, n, k, config)
        (a, sfa), (b, sfb) = a, b
        assert maps.keys() == {*MAPS_A[:2], *MAPS_B, *MAPS_SFA, MAP_D}
        for (full, edge), rows, size, data in (
            ([maps[i] for i in MAPS_A[:2]], a_rows, m, a),
            ([maps[i] for i in MAPS_B], b_rows, n, b),
        ):
            for each in (edge, full):
                assert (each.dtype, each.swizzle) == ("UINT8", "128B")
                assert each.address == data.data_ptr() and each.shape == (size, k)
                assert each.stride_bytes == (data.stride(0) if size > 1 else k)
            assert full.box == (rows, 128)
            assert edge.box == (size % rows or rows, 128)
        sfa_boxes = config.block_m, m % config.block_m
        for each, rows in zip((maps[i] for i in MAPS_SFA), sfa_boxes, strict=True):
            assert (each.dtype, each.swizzle, each.shape) == ("FLOAT32", "NONE", (9, m))
            assert each.address == sfa.data_ptr() and each.stride_bytes == 4 * sfa.stride(1)
            assert each.box == (1, -(-rows // 4) * 4 or config.block_m)
        store = maps[MAP_D]
        assert (store.dtype, store.swizzle) == ("BFLOAT16", f"{2 * config.slab_n}B")
        assert store.address == d.data_ptr() and store.shape == (m, n)
        assert store.stride_bytes == (2 * d.stride(0) if m > 1 else 2 * n)
        assert store.box == (16, config.slab_n)
        for each in maps.values():
            assert max(each.box) <= 256 and each.address % 16 == each.stride_bytes % 16 == 0
            element_bytes = {"UINT8": 1, "BFLOAT16": 2, "FLOAT32": 4}[each.dtype]
            assert each.box[1] * element_bytes % 16 == 0
        assert (args.shape_m, args.shape_n, args.shape_k) == (m, n, k)
        assert args.sfb == sfb.data_ptr()
        assert (args.sfb_stride_n, args.sfb_stride_k) == sfb.stride()
        assert args.raster_m >= 1
        assert args.is_b_read_once == (m <= config.block_m * config.cluster_m)
        assert args.d == d.data_ptr() and args.d_stride == store.stride_bytes // 2
        assert bytes(args.rows) == bytes(ctypes.sizeof(args.rows)), "nothing is grouped"


def test_transposed_scales_of_b(fake):
    operands = make_operands(64, 520, 1040, device="cpu")
    operands = operands._replace(b=(operands.b[0], operands.b[1].t().contiguous().t()))
    d = torch.empty(64, 520, dtype=torch.bfloat16)
    make_dense_launch(operands, d, CONFIGS[7])()
    args = KernelArgs.from_buffer_copy(fake.launched[-1].args)
    assert (args.sfb_stride_n, args.sfb_stride_k) == (1, 5)


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_every_stage_gets_the_bytes_that_it_waits_for(fake, config):
    """The kernel's own expression against the boxes of the maps that it picks, on every tile."""
    a_rows, b_rows = config.block_m // config.cluster_n, config.block_n // config.cluster_m

    def inside(first, count, total):
        return min(count, total - first) if first < total else 0

    for m, n in SIZES:
        *_, maps = arguments(fake, m, n, 256, config)

        def box_rows(first, count, total, places, maps=maps):
            """Rows of the box that is loaded there, 0 if nothing is."""
            rows = inside(first, count, total)
            if rows == 0:
                return 0
            box = maps[places[rows != count]].box[0]
            assert box == rows, "a box that reaches outside is slow"
            return box

        units_m = -(-m // (config.block_m * config.cluster_m))
        units_n = -(-n // (config.block_n * config.cluster_n))
        last_tiles = [
            (unit_m * config.cluster_m + i, unit_n * config.cluster_n + j)
            for unit_m in {0, units_m - 1}
            for unit_n in {0, units_n - 1}
            for i in range(config.cluster_m)
            for j in range(config.cluster_n)
        ]
        for m_block, n_block in last_tiles:
            row, column = m_block * config.block_m, n_block * config.block_n
            loaded = sum(
                box_rows(row + rank * a_rows, a_rows, m, MAPS_A) for rank in range(config.cluster_n)
            ) + sum(
                box_rows(column + rank * b_rows, b_rows, n, MAPS_B)
                for rank in range(config.cluster_m)
            )
            rows_m = inside(row, config.block_m, m)
            rows_n = inside(column, config.block_n, n)
            scales = maps[MAPS_SFA[rows_m != config.block_m]].box[1] if rows_m else 0
            waited_for = stage_bytes(config, rows_m, rows_n)
            assert loaded * 128 + scales * 4 == waited_for, (m, n, m_block, n_block)


def test_a_tensor_map_is_encoded_once(fake):
    first = make_tensor_map(4096, "uint8", (64, 256), 256, (64, 128), 128)
    assert make_tensor_map(4096, "uint8", (64, 256), 256, (64, 128), 128) == first
    assert len(fake.encoded) == 1 and len(first) == 128
    make_tensor_map(8192, "uint8", (64, 256), 256, (64, 128), 128)
    assert len(fake.encoded) == 2
