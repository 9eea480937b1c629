"""The grouped benchmarks' own logic: group sizes, what is counted, and that wrong results abort."""

import json
import math
import os
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import deep_gemm
from benchmarks import (
    dense,
    grouped,
    grouped_cases,
    grouped_plots,
    grouped_search,
    results,
    run,
    table,
)
from benchmarks.cases import Case, peers
from benchmarks.grouped_cases import Data, Family, GroupedCase, Operands, aligned
from benchmarks.timing import Figures, Measurement
from deep_gemm import plan

SMALL = Family(3, 5, 128, 256)
LAYOUTS = ["contiguous", "masked", "psum"]


class StillTimer:
    """Runs every call once and says that call i of n took n - i microseconds."""

    @contextmanager
    def session(self):
        yield self

    def measure(self, calls, repeats=20):
        for call in calls:
            call()
        times = [float(len(calls) - index) for index in range(len(calls))]
        return Measurement(len(calls), repeats, 1800, 600.5, [Figures(us, us, us) for us in times])


@pytest.fixture
def on_cpu(monkeypatch):
    """A yardstick that runs anywhere."""
    monkeypatch.setattr(dense, "YARDSTICK", Case(16, 32, 128))
    monkeypatch.setattr(dense.Inputs, "scaled_mm_tensor", lambda self: self.bf16)


def test_cases_are_the_peers_the_added_ones_and_both_without_padding():
    cases = grouped_cases.grouped_cases()
    assert len(cases) == len(set(cases)) == 2 * (20 + 5)
    assert sum(bool(case.peer) for case in cases) == len(peers()["grouped"]) == 20
    assert {str(case) for case in cases} >= {
        "contiguous 4x8192 4096x7168",
        "masked 160x8 3072x5120",
        "psum 512x2 1024x2048",
    }


def test_group_sizes_are_those_that_the_peers_measured():
    for case in grouped_cases.grouped_cases():
        if case.peer:
            assert case.tokens == case.peer["tokens"], str(case)
    assert Family(3, 1, 8, 16).sizes == [1, 1, 1]


def test_each_layout_has_the_rows_that_its_call_needs():
    contiguous, masked, psum = (GroupedCase(layout, SMALL) for layout in LAYOUTS)
    sizes = SMALL.sizes
    assert [end - begin for begin, end in masked.spans] == sizes
    assert [begin for begin, _ in contiguous.spans] == [0, 128, 256]
    assert [begin for begin, _ in masked.spans] == [0, 128, 256]
    assert psum.spans[0][1] == psum.spans[1][0] == sizes[0]
    assert (contiguous.rows, masked.rows, psum.rows) == (384, 384, sum(sizes))
    assert (contiguous.m, masked.m, psum.m) == (384, 128, sum(sizes))
    assert GroupedCase("masked", Family(2, 512, 128, 128)).m_max == 4096


def test_bytes_and_flops_are_of_real_rows():
    t = sum(SMALL.sizes)
    for case in (GroupedCase(layout, SMALL) for layout in LAYOUTS):
        assert case.bytes == t * 256 + 3 * 128 * 256 + 4 * 2 * (t + 3) + 2 * t * 128
        assert case.flops == 2 * t * 128 * 256
        assert case.floor_us == pytest.approx(case.bytes / 4.55e6)


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        ("masked 32x8 4096x7168", 1),
        ("masked 32x8", 2),
        ("psum", 25),
        ("contiguous,masked", 25),
        ("contiguous *x7168, 4096x7168 contiguous", 3),
        ("512x2", 2),
    ],
)
def test_patterns_select_cases(patterns, count):
    assert len(grouped_cases.grouped_cases(patterns)) == count


@pytest.mark.parametrize("patterns", ["dense", "masked 7x7", "masked,", ""])
def test_a_pattern_that_matches_nothing_is_an_error(patterns):
    with pytest.raises(ValueError, match="matches none of the 50 grouped cases"):
        grouped_cases.grouped_cases(patterns)


def test_the_alignment_is_in_force_for_a_while_only():
    before = deep_gemm.get_mk_alignment_for_contiguous_layout()
    with pytest.raises(KeyError), aligned(GroupedCase("psum", SMALL)):
        assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 1
        raise KeyError
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_hold_the_same_rows_in_every_layout(layout):
    data = Data(SMALL, "cpu")
    operands = Operands(GroupedCase(layout, SMALL), data)
    a, sfa = (each.flatten(0, -2)[operands.row_of_token] for each in operands.a)
    assert torch.equal(a.float(), data.rows[0].float())
    assert torch.equal(sfa, data.rows[1])
    assert deep_gemm.get_mn_major_tma_aligned_tensor(operands.a[1]) is operands.a[1]
    grouped.check(operands, operands.ours, "ours")


@pytest.mark.parametrize("layout", ["masked", "contiguous"])
def test_a_write_to_padding_is_seen(layout):
    operands = Operands(GroupedCase(layout, SMALL), Data(SMALL, "cpu"))
    d = operands.d.view(-1, SMALL.n)
    for value, is_fine in ((0.0, layout == "contiguous"), (1.0, False)):

        def call(value=value):
            operands.ours()
            d[100] = value

        if is_fine:
            grouped.check(operands, call, "call")
        else:
            with pytest.raises(AssertionError, match="row 100 is padding, but was written"):
                grouped.check(operands, call, "call")


def test_the_suite_runs_and_its_file_reads_back(on_cpu, tmp_path):
    cases = [GroupedCase(layout, SMALL) for layout in LAYOUTS]
    cases.append(GroupedCase("masked", Family(2, 3, 128, 128)))
    rows, yardstick_us = grouped.run_grouped(cases, StillTimer(), device="cpu", triton=False)
    path = tmp_path / "grouped.json"
    results.save(path, results.make_meta("python -m x", yardstick_us, "abc"), rows)
    _, read = results.load(path)
    assert read == rows
    assert [row["layout"] for row in rows] == [*LAYOUTS, "masked"]
    row = read[1]
    assert tuple(row) == results.FIELDS
    assert (row["op"], row["recipe"]) == ("m_grouped_fp8_gemm_nt_masked", "1,128,128")
    assert (row["m"], row["n"], row["k"], row["groups"], row["m_per_group"]) == (
        128,
        128,
        256,
        3,
        5,
    )
    assert row["tokens"] == sum(SMALL.sizes)
    assert row["tflops"] == pytest.approx(2e-6 * row["tokens"] * 128 * 256, rel=1e-4)
    assert row["gb_per_s"] == pytest.approx(cases[1].bytes / 1e3, rel=1e-4)
    assert row["ratio_to_deepgemm"] is row["triton_us"] is row["triton_source"] is None
    assert row["config"]["is_grouped"]
    assert rows[2]["op"] == "m_grouped_fp8_gemm_nt_contiguous"


@pytest.mark.parametrize("wrong", [0.0, math.nan, 2.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_result_aborts_the_suite(on_cpu, monkeypatch, layout, wrong):
    right = Operands.ours

    def ours(self):
        right(self)
        self.d.view(-1, SMALL.n)[self.row_of_token[-1]] *= wrong

    monkeypatch.setattr(Operands, "ours", ours)
    with pytest.raises(AssertionError, match=f"grouped GEMM {layout} 3x5 128x256"):
        grouped.run_grouped([GroupedCase(layout, SMALL)], StillTimer(), "cpu", triton=False)


def fake_triton(wrong=()):
    """Stands for the module: every build is our call; those in `wrong` spoil a row or raise."""
    built = []

    def make_call(tile, a, b, d, groups):
        built.append(tile)
        if tile in wrong:
            return lambda: d.fill_(1.0)
        if tile == "raises":
            raise RuntimeError("out of shared memory")
        case = GroupedCase("masked" if isinstance(groups, torch.Tensor) else "psum", SMALL)
        operands = Operands.__new__(Operands)
        operands.case, operands.a, operands.b, operands.d = case, a, b, d
        ends = groups if case.layout == "masked" else [end for _, end in groups]
        operands.grouped_layout = torch.as_tensor(ends, dtype=torch.int32)
        return operands.ours

    tiles = ["slow", "wrong", "fast", "raises"]
    module = SimpleNamespace(TILES=tiles, tiles_for=lambda most_rows: tiles, make_call=make_call)
    module.precompile = lambda tile, masked: built.append((tile, masked))
    module.built = built
    return module


def test_triton_is_measured_where_no_peer_was_and_its_best_right_build_counts(on_cpu, monkeypatch):
    module = fake_triton(wrong=["wrong"])
    monkeypatch.setattr(grouped, "_triton_module", lambda: module)
    cases = [GroupedCase(layout, SMALL) for layout in ("masked", "psum")]
    with pytest.warns(UserWarning, match="left out: (wrong|raises)"):
        rows, _ = grouped.run_grouped(cases, StillTimer(), device="cpu")
    assert ("slow", True) in module.built and ("fast", False) in module.built
    for row in rows:
        assert (row["us"], row["triton_us"], row["triton_source"]) == (2.0, 1.0, "own")


def test_triton_that_never_works_leaves_no_figure(on_cpu, monkeypatch):
    module = fake_triton(wrong=["slow", "wrong", "fast"])
    monkeypatch.setattr(grouped, "_triton_module", lambda: module)
    with pytest.warns(UserWarning, match="left out"):
        rows, _ = grouped.run_grouped([GroupedCase("psum", SMALL)], StillTimer(), device="cpu")
    assert rows[0]["triton_us"] is rows[0]["triton_source"] is None


def test_without_triton_the_suite_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "benchmarks.triton_grouped", None)
    monkeypatch.delattr("benchmarks.triton_grouped", raising=False)
    with pytest.warns(UserWarning, match="no Triton baseline"):
        assert grouped._triton_module() is None


def test_peers_figures_are_scaled_by_the_yardstick():
    (case,) = grouped_cases.grouped_cases("masked 32x8 4096x7168")
    row = grouped.grouped_row(case, Figures(200.0, 199.0, 201.0), 153.6 * 1.1)
    assert row["triton_source"] == "peer"
    assert row["triton_us"] == pytest.approx(218.45 * 1.1, rel=1e-4)
    assert row["ratio_to_deepgemm"] == pytest.approx(236.73 * 1.1 / 200, rel=1e-4)


def result_rows():
    """Rows as a run would give them, at 1.25 of the floor or 1200 TFLOPS, whichever is slower."""
    rows = []
    for case in grouped_cases.grouped_cases():
        us = max(1.25 * case.floor_us, case.flops / 1.2e9)
        own = None if case.peer else 1.5 * us
        rows.append(grouped.grouped_row(case, Figures(us, us, us), 153.6, own))
    return rows


def test_readme_gets_a_table_of_grouped_results(tmp_path):
    meta = results.make_meta("python -m x", 153.6, "abc1234")
    results.save(tmp_path / "h200_grouped.json", meta, result_rows())
    text = table.render(tmp_path)
    assert "| contiguous | 4096 to 8192 | 4 | 1200 to 1200 | " not in text
    assert "| contiguous | 4096 to 8192 | 4 | 1200 | **" in text
    assert "| masked | 2 to 32 | 13 | " in text
    assert "| prefix sums, no padding | 2 to 32 | 13 | " in text
    assert "| **0.80** (0.80) |" in text
    assert "|  | **1.50** (1.50) |" in text
    assert "1.00 (1.00) of the contiguous layout's and 1.00 (1.00) of the masked layout's" in text
    assert "commit abc1234" in text


def test_a_table_of_one_layout_says_nothing_about_the_others():
    rows = [row for row in result_rows() if row["layout"] == "psum"]
    text = table.grouped_table({"gpu": "x", "date": "y", "commit": "z"}, rows)
    assert "The same rows as prefix sums" not in text
    assert text.count("prefix sums, no padding") == 3


@pytest.mark.parametrize("layouts", [LAYOUTS, ["psum"], ["masked"], ["contiguous"]])
def test_plots_are_written(tmp_path, layouts):
    pytest.importorskip("matplotlib")
    rows = [row for row in result_rows() if row["layout"] in layouts]
    (path,) = grouped_plots.plot(rows, tmp_path, "title")
    assert path.name == "grouped_tflops.png"
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_needs_a_gpu_and_explains_unknown_shapes():
    result = CliRunner().invoke(run.app, ["grouped"])
    assert result.exit_code == 2
    assert "needs a Hopper GPU" in result.output
    result = CliRunner().invoke(run.app, ["grouped", "--shapes", "nonsense"])
    assert result.exit_code == 2
    assert "nonsense" in result.output


def test_the_command_prints_writes_and_plots(monkeypatch, tmp_path):
    def run_grouped(cases, timer, track, triton):
        assert (len(cases), triton) == (2, False)
        return [row for row in result_rows() if row["groups"] == 512], 153.6

    monkeypatch.setattr(grouped, "run_grouped", run_grouped)
    monkeypatch.setattr(run, "_hopper", lambda make: None)
    path = tmp_path / "grouped.json"
    options = ["--shapes", "512x2", "--no-triton", "--out", str(path), "--plot", str(tmp_path)]
    result = CliRunner().invoke(run.app, ["grouped", *options])
    assert result.exit_code == 0, result.output
    assert "| prefix sums, no padding | 2 | 1 |" in result.output
    assert "layout" in result.output
    assert len(results.load(path)[1]) == 2
    assert (tmp_path / "grouped_tflops.png").exists()


def test_search_times_every_config_that_is_right(monkeypatch, capsys):
    small, large = grouped_search.load_configs_of(
        [{"block_m": m, "block_n": 64, "num_consumers": 1} for m in (64, 128)]
    )
    refused = grouped_search.load_configs_of([{"block_m": 64, "block_n": 32, "num_consumers": 1}])[
        0
    ]

    def run_config(operands, config):
        if config == refused:
            raise ValueError("does not fit")
        operands.ours()
        if config == large:
            operands.d.view(-1, SMALL.n)[operands.row_of_token[0]] *= 2

    monkeypatch.setattr(grouped_search, "run", run_config)
    saved = []
    cases = [GroupedCase(layout, SMALL) for layout in LAYOUTS]
    rows = grouped_search.sweep(
        cases, [refused, large, small], StillTimer(), lambda rows: saved.append(len(rows)), 2, "cpu"
    )
    assert [row["layout"] for row in rows] == LAYOUTS
    assert saved == [1, 2, 3]
    family = {"groups": 3, "m_per_group": 5, "n": 128, "k": 256}
    us = {"2": 1.0}
    assert rows[0] == {"layout": "contiguous", **family, "tokens": sum(SMALL.sizes), "us": us}
    output = capsys.readouterr().out
    assert "does not fit" in output
    assert "relative error" in output


@pytest.mark.parametrize("layout", LAYOUTS)
def test_search_calls_run_with_an_explicit_config(layout):
    operands = Operands(GroupedCase(layout, SMALL), Data(SMALL, "cpu"))
    (config,) = grouped_search.load_configs_of([{"block_m": 64, "block_n": 64, "num_consumers": 1}])
    grouped.check(operands, lambda: grouped_search.run(operands, config), "run")


def test_search_reads_configs_in_both_forms_and_makes_them_grouped(tmp_path):
    path = tmp_path / "configs.json"
    short = {"block_m": 128, "block_n": 128, "num_consumers": 2}
    path.write_text(json.dumps([short]))
    (config,) = grouped_search.load_configs(path)
    assert (config.block_m, config.is_grouped) == (128, True)
    path.write_text(json.dumps([{name: getattr(config, name) for name in config.__slots__}]))
    assert grouped_search.load_configs(path) == [config]


def test_searched_tiles_fit_into_shared_memory():
    configs = grouped_search.grid()
    assert 50 < len(configs) == len(set(configs)) < 200
    for config in configs:
        assert config.is_grouped
        assert config.cluster_m == 1
        assert config.smem_bytes <= plan.SMEM_LIMIT


TRITON_CHECK = """
import torch
from benchmarks import grouped, triton_grouped
from benchmarks.grouped_cases import Data, Family, GroupedCase, Operands
data = Data(Family(3, 20, 256, 384), "cpu")
for layout in ("contiguous", "masked", "psum"):
    operands = Operands(GroupedCase(layout, data.family), data)
    groups = operands.grouped_layout if layout == "masked" else operands.case.spans
    for tile in ((16, 32, 4, 3), (64, 128, 4, 3)):
        tile = triton_grouped.Tile(*tile)
        call = triton_grouped.make_call(tile, operands.a, operands.b, operands.d, groups)
        grouped.check(operands, call, str(tile))
"""


def test_the_triton_kernel_is_right_in_tritons_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", TRITON_CHECK]
    subprocess.run(command, env=environment, cwd=results.ROOT, check=True)
