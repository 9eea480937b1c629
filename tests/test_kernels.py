"""Every kernel that a plan may choose, compiled for sm_90a and inspected; no GPU needed."""

import dataclasses
import re
import shutil
import time

import pytest
from dense_tools import CONFIGS, DEFECTS, config_id
from grouped_defects import GROUPED_DEFECTS
from grouped_tools import GROUPED_CONFIGS
from jit_tools import nvrtc_12

from deep_gemm import jit
from deep_gemm.jit import codegen, compiler, cubin
from deep_gemm.plan import CANDIDATES, GROUPED_CANDIDATES, SMEM_LIMIT, make_config
from deep_gemm.types import KernelConfig

pytest_plugins = ["jit_fixtures"]

KERNEL = "fp8_gemm_1d2d"
SLOWEST = [  # to compile, and its limit in seconds of a busy core; an idle one takes a third
    (CANDIDATES[4].config, 1.5),
    (make_config(128, 96, 2, num_partials=2, is_grouped=True), 2.5),
]
REGISTERS_OF_A_THREAD = {2: 255, 3: 168, 4: 128}  # by warpgroups: 64K registers for all threads
# One of each number of warpgroups, with and without a cluster, with one weight scale and with two.
FEW = [CANDIDATES[i].config for i in (0, 6, 10, 13)]
FEW += [candidate.config for candidate in GROUPED_CANDIDATES]
FEW.append(make_config(192, 128, 3, cluster_n=2, is_grouped=True))


def kernel_id(config):
    return "grouped-" * config.is_grouped + config_id(config)


configs = pytest.mark.parametrize("config", [*CONFIGS, *GROUPED_CONFIGS], ids=kernel_id)
few_configs = pytest.mark.parametrize("config", FEW, ids=kernel_id)
needs_nvdisasm = pytest.mark.skipif(
    cubin._nvdisasm() is None, reason="no nvdisasm: pip install nvidia-cuda-nvdisasm"
)


def main_loops(sass):
    """The opcodes of the innermost loop around each wgmma, in the order of the code."""
    labels, opcodes, jumps = {}, [], []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(opcodes)
        elif found := cubin._INSTRUCTION.search(line):
            if back := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line):
                jumps.append((back[1], len(opcodes)))
            opcodes.append(found[1])
    loops = {(labels[to], at) for to, at in jumps if labels.get(to, at + 1) <= at}
    around = [
        min(
            ((end - begin, begin, end) for begin, end in loops if begin <= i <= end),
            default=(0, i, i),
        )
        for i, opcode in enumerate(opcodes)
        if opcode == "QGMMA"
    ]
    return [opcodes[begin : end + 1] for _, begin, end in sorted(set(around))]


def inspect(config, code):
    """Check what is true of every kernel of ours, whichever compiler made it."""
    resources = cubin.kernels(code)
    assert set(resources) == {KERNEL}
    assert resources[KERNEL].frame_bytes == 0
    warpgroups = config.num_consumers + 1
    assert resources[KERNEL].registers <= REGISTERS_OF_A_THREAD[warpgroups]

    sass = cubin.disassemble(code)
    counts = cubin.opcode_counts(sass)
    waves = config.block_m // 64 // config.num_consumers
    in_groups = config.num_partials if waves == 1 and config.num_partials > 1 else 0
    assert counts["QGMMA"] == 4 * (waves + in_groups), "four wgmmas for each 64 rows and k-block"
    loops = main_loops(sass)
    assert len(loops) == (2 if in_groups else 1)
    assert sum(loop.count("QGMMA") for loop in loops) == counts["QGMMA"]
    for loop in loops:
        # NOTES of tile_queue.cuh: what the loop knows has to stay in uniform registers.
        wgmmas = [i for i, opcode in enumerate(loop) if opcode == "QGMMA"]
        between = loop[wgmmas[0] : wgmmas[-1]]
        assert "R2UR" not in between, "descriptors move between wgmmas: up to 1.6 times as slow"
        assert loop.count("R2UR") <= 1
    assert counts["UTMALDG"] == 3, "A, B and the scales of A"
    assert counts["UTMASTG"] == waves * config.block_n // config.slab_n
    assert counts["STSM"] == waves * config.block_n // 16, "16 columns of a warp at a time"
    assert counts["USETMAXREG"] == (2 if config.num_consumers > 1 else 0)
    assert counts["UCGABAR_ARV"] == (2 if config.cluster_size > 1 else 0)
    assert counts["LDL"] == counts["STL"] == 0, "local memory"
    if config.is_grouped:
        # Rows of partial slabs go to D from registers, two columns at a time; one more store
        # leaves the counter of units as it was.
        drawing = config.cluster_size == 1
        assert counts["STG"] == waves * config.block_n // 4 + drawing
        assert counts["ATOMG"] == drawing, "units are drawn, but by single CTAs only"
    else:
        assert counts["STG"] == counts["ATOMG"] == 0
        assert counts["LDG"] in (1, 2), "the scales of B are all that is loaded without TMA"


@needs_nvdisasm
@configs
def test_cubin(config, cache_dir, record_property):
    begin = time.perf_counter()
    code = jit.build(KERNEL, config.constants())  # refuses spills and serialised wgmmas
    seconds = time.perf_counter() - begin
    record_property("compile_seconds", round(seconds, 3))
    print(f"compiled in {seconds:.2f} s")
    inspect(config, code)


@pytest.mark.parametrize("config, limit", SLOWEST, ids=["dense", "grouped"])
def test_time_to_compile(config, limit, cache_dir):
    jit.build(KERNEL, CANDIDATES[0].config.constants())  # loads the compiler
    begin = time.process_time()
    jit.build(KERNEL, config.constants())
    seconds = time.process_time() - begin
    print(f"{kernel_id(config)}: {seconds:.2f} s")
    assert seconds < limit


@needs_nvdisasm
@few_configs
def test_cubin_of_nvrtc_12(config):
    compile_source = nvrtc_12()
    if compile_source is None:
        pytest.skip("no NVRTC of CUDA 12: pip install nvidia-cuda-nvrtc-cu12")
    source = codegen.make_source(KERNEL, config.constants())
    code, log = compile_source(source, compiler.options())
    assert not compiler._REFUSED.search(log), log
    inspect(config, code)


@needs_nvdisasm
@few_configs
def test_cubin_of_nvcc(config, cache_dir, monkeypatch):
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "0")
    code = jit.build(KERNEL, config.constants())
    assert compiler.compiler_version().startswith("nvcc")
    inspect(config, code)


@pytest.mark.parametrize("defect", [*DEFECTS, *GROUPED_DEFECTS], ids=lambda defect: defect.name)
def test_defects_of_the_gpu_tests_compile(defect, tmp_path, cache_dir, monkeypatch):
    """So that on the GPU it is the oracle which refuses them."""
    good = jit.build(KERNEL, defect.config.constants())
    monkeypatch.setattr(codegen, "KERNELS", defect.break_kernels(tmp_path / "broken"))
    jit.forget()
    assert jit.build(KERNEL, defect.config.constants()) != good


@pytest.mark.parametrize("name", ["smem_bytes", "num_threads"])
def test_kernel_and_plan_must_agree(name, cache_dir):
    constants = CANDIDATES[0].config.constants()
    constants[name.upper()] += 128
    with pytest.raises(jit.CompileError, match="static assertion failed"):
        jit.build(KERNEL, constants)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"block_m": 96}, "waves fill the tile"),
        ({"cluster_m": 2, "cluster_n": 2}, "each CTA of a cluster feeds every other one"),
        ({"num_partials": 5}, "wgmma_wait_group"),
        ({"num_stages": 3}, "holds that many stages"),
        ({"block_n": 16, "cluster_m": 4}, "swizzle's period"),
        ({"block_n": 48, "slab_n": 32}, "slabs divide the tile"),
    ],
    ids=str,
)
def test_configs_that_cannot_work_do_not_compile(changes, reason, cache_dir):
    config = dataclasses.replace(KernelConfig(64, 32, 1, 8, num_partials=4, slab_n=32), **changes)
    with pytest.raises(jit.CompileError) as caught:
        jit.build(KERNEL, config.constants())
    assert reason in caught.value.log


def test_grouped_kernels_have_no_clusters_along_m(cache_dir):
    config = dataclasses.replace(CANDIDATES[11].config, cluster_m=2, is_grouped=True)
    with pytest.raises(jit.CompileError) as caught:
        jit.build(KERNEL, config.constants())
    assert "the CTAs of a cluster share the rows of A" in caught.value.log


def test_tiles_of_grouped_kernels_are_not_too_tall(cache_dir):
    config = dataclasses.replace(CANDIDATES[13].config, is_grouped=True)
    with pytest.raises(jit.CompileError) as caught:
        jit.build(KERNEL, config.constants())
    assert "TMA's boxes are no longer" in caught.value.log
    with pytest.raises(ValueError, match="block_m is 256, expected at most 192 if grouped"):
        make_config(256, 128, 2, is_grouped=True)


def test_the_loop_of_a_wgmma_is_found():
    sass = """
.L_x_1:
        /*0000*/                   R2UR UR4, R5 ;
.L_x_2:
        /*0010*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24 ;
        /*0020*/              @!P0 R2UR UR8, R9 ;
        /*0030*/               @P1 BRA `(.L_x_2) ;
        /*0040*/                   BRA `(.L_x_3) ;
        /*0050*/               @P2 BRA `(.L_x_1) ;
.L_x_3:
        /*0060*/                   QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24 ;
        /*0070*/                   EXIT ;
"""
    assert main_loops(sass) == [["QGMMA"], ["QGMMA", "R2UR", "BRA"]]


@configs
def test_shared_memory_fits(config):
    assert config.smem_bytes <= SMEM_LIMIT
    assert config.smem_bytes % 1024 == 0


def test_made_configs_use_the_shared_memory_that_there_is():
    for block_m, block_n, consumers in ((64, 16, 1), (128, 96, 2), (192, 128, 3), (256, 128, 2)):
        config = make_config(block_m, block_n, consumers)
        stage = dataclasses.replace(config, num_stages=config.num_stages + 1)
        slab = dataclasses.replace(config, num_d_slabs=config.num_d_slabs + 1)
        whole = config.num_d_slabs == block_m // (64 * consumers) * (block_n // config.slab_n)
        assert config.smem_bytes <= SMEM_LIMIT
        assert config.num_stages == 12 or stage.smem_bytes > SMEM_LIMIT or not whole
        assert whole or slab.smem_bytes > SMEM_LIMIT
