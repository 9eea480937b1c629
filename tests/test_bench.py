"""The benchmarks' own logic: what is counted, what is written, and that a wrong result aborts."""

import json
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType
from typer.testing import CliRunner

from benchmarks import baselines, dense, plots, results, run, search, table, timing
from benchmarks.cases import Case, by_weight, dense_cases, peers, sustained_cases
from benchmarks.compile import run_compile
from benchmarks.timing import Figures, Measurement, Session, split_calls
from deep_gemm import plan
from deep_gemm.jit import CompileError

FLUSH = ["fill", "flush"]


class StillTimer:
    """Runs every call once and says that call i took i + 1 microseconds."""

    @contextmanager
    def session(self):
        yield self

    def measure(self, calls, repeats=20):
        for call in calls:
            call()
        figures = [Figures(index + 1.0, index + 0.5, index + 2.0) for index in range(len(calls))]
        return Measurement(len(calls), repeats, 1800, 600.5, figures)


class StillMonitor:
    def sample(self):
        return 1755, 690.0


@pytest.fixture
def on_cpu(monkeypatch):
    """Baselines that run anywhere, and a small yardstick."""
    monkeypatch.setattr(dense, "YARDSTICK", Case(16, 32, 128))
    monkeypatch.setattr(baselines.Inputs, "scaled_mm_tensor", lambda self: self.bf16)


def test_dense_cases_are_those_of_the_peers():
    assert len(dense_cases()) == len(peers()["dense"]) == 72
    assert len(sustained_cases()) == 4
    groups = by_weight(dense_cases())
    assert len(groups) == 9
    assert all((case.n, case.k) == key for key, group in groups.items() for case in group)


@pytest.mark.parametrize(
    ("patterns", "count"),
    [("4096x*x7168", 4), ("1x*,16x*", 18), ("1x*,1x2112x7168", 9), ("33x48x160", 1)],
)
def test_patterns_select_cases(patterns, count):
    assert len(dense_cases(patterns)) == count


@pytest.mark.parametrize("patterns", ["7x*", "1x2", "axbxc"])
def test_a_pattern_that_matches_nothing_is_an_error(patterns):
    with pytest.raises(ValueError, match="no shape MxNxK"):
        dense_cases(patterns)


def test_bytes_count_operands_scales_and_output():
    assert Case(3, 160, 200).bytes == (3 + 160) * 200 + 4 * (3 * 2 + 2 * 2) + 2 * 3 * 160


def test_calls_are_split_at_the_flushes():
    records = [
        *(("fill", 1.0), ("flush", 9.0)),
        *(("a", 2.0), ("a", 3.0)),
        *(("fill", 1.0), ("flush", 9.0)),
        *(("fill", 4.0), ("b", 5.0)),  # a fill of the call's own stays with the call
        *(("fill", 1.0), ("flush", 9.0)),
    ]
    assert split_calls(records, FLUSH) == [[2.0, 3.0], [4.0, 5.0]]


def test_a_flush_that_looks_different_is_an_error():
    with pytest.raises(RuntimeError, match="a flush left other records"):
        split_calls([("flush", 9.0), ("a", 1.0), ("fill", 1.0), ("flush", 9.0)], FLUSH)


def test_a_session_sums_kernels_and_separates_interleaved_calls():
    session = Session(lambda: None, StillMonitor())
    session._measurements = [Measurement(2, 3), Measurement(1, 2)]
    first = [[1.0, 1.0], [10.0], [2.0, 2.0], [30.0], [3.0, 3.0], [20.0]]
    session.fill([*first, [5.0], [7.0]])
    assert [figures.us for figures in session._measurements[0].figures] == [4.0, 20.0]
    assert session._measurements[1].figures[0].us == 6.0


@pytest.mark.parametrize("calls", [[[1.0]], [[1.0], []], [[1.0], [1.0, 1.0]]])
def test_a_session_refuses_records_that_do_not_fit(calls):
    session = Session(lambda: None, StillMonitor())
    session._measurements = [Measurement(1, 2)]
    with pytest.raises(RuntimeError, match="recorded 1 calls|expected the same number"):
        session.fill(calls)


class Gpu:
    """Stands for the device and its profiler: what was launched while a session was open."""

    def __init__(self, monkeypatch, num_empty_sessions):
        self.records = []
        self.num_empty_sessions = num_empty_sessions
        monkeypatch.setattr(timing, "_profiler", self.profiler)
        monkeypatch.setattr(timing, "L2Flush", lambda: lambda: self.launch("flush", 99))
        monkeypatch.setattr(timing, "GpuMonitor", StillMonitor)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def launch(self, name, us):
        self.records.append((name, us))

    @contextmanager
    def profiler(self):
        self.records.clear()
        kineto = SimpleNamespace()
        yield SimpleNamespace(profiler=SimpleNamespace(kineto_results=kineto))
        if self.num_empty_sessions:
            self.num_empty_sessions -= 1
            self.records.clear()
        gpu = [self.event(i, DeviceType.CUDA, *each) for i, each in enumerate(self.records)]
        host = [self.event(i, DeviceType.CPU, "cudaLaunchKernel", 5) for i in range(len(gpu))]
        kineto.events = lambda: host + gpu[::-1]

    @staticmethod
    def event(start, device, name, us):
        return SimpleNamespace(
            name=lambda: name,
            device_type=lambda: device,
            is_user_annotation=lambda: False,
            start_ns=lambda: start,
            duration_ns=lambda: us * 1000,
        )


def test_a_timer_reads_the_profilers_events_and_survives_empty_sessions(monkeypatch):
    gpu = Gpu(monkeypatch, num_empty_sessions=2)
    timer = timing.Timer()
    with timer.session() as session:
        measurement = session.measure(
            [lambda: gpu.launch("a", 2), lambda: [gpu.launch("b", us) for us in (3, 4)]], repeats=5
        )
    assert [figures.us for figures in measurement.figures] == [2.0, 7.0]
    assert (measurement.sm_mhz, measurement.power_w) == (1755, 690.0)


def test_a_profiler_that_never_records_is_an_error(monkeypatch):
    Gpu(monkeypatch, num_empty_sessions=99)
    with pytest.raises(RuntimeError, match="records no GPU activity"):
        timing.Timer()


def test_figures_are_median_and_deciles():
    figures = Figures.of([float(value) for value in range(1, 22)])
    assert (figures.us, figures.p10_us, figures.p90_us) == (11.0, 3.0, 19.0)


def test_ratio_to_deepgemm_corrects_for_the_clock_of_the_day():
    # twice as fast, on a GPU that needs 10 % longer for the yardstick
    assert results.ratio_to_deepgemm(100.0, 50.0, 153.6 * 1.1) == pytest.approx(2.2)
    assert results.ratio_to_deepgemm(None, 50.0, 153.6) is None


def test_rows_have_exactly_the_agreed_fields():
    row = results.make_row("copy", Figures(1.0, 1.0, 1.0), m=3)
    assert tuple(row) == results.FIELDS
    with pytest.raises(TypeError, match="no fields of a result row"):
        results.make_row("copy", Figures(1.0, 1.0, 1.0), time=3)


def test_the_dense_suite_runs_and_its_file_reads_back(on_cpu, tmp_path):
    cases = [Case(5, 32, 256), Case(17, 32, 256), Case(4, 136, 144)]
    rows, yardstick_us = dense.run_dense(cases, StillTimer(), device="cpu")
    path = tmp_path / "results" / "dense.json"
    results.save(path, results.make_meta("python -m x", yardstick_us, "abc"), rows)
    meta, read = results.load(path)
    assert read == rows
    assert set(meta) == {
        *("commit", "date", "gpu", "driver", "cuda", "torch", "python", "command", "yardstick_us"),
    }
    assert (meta["commit"], meta["yardstick_us"]) == ("abc", 1.0)
    assert [(row["m"], row["n"], row["k"]) for row in read] == [
        (case.m, case.n, case.k) for case in cases
    ]
    assert read[0]["ratio_to_tensor"] == 0.5
    assert read[0]["tflops"] == pytest.approx(2e-6 * 5 * 32 * 256)
    assert (read[0]["sm_mhz"], read[0]["power_w"]) == (1800, 600.5)
    assert read[0]["config"]["block_m"] > 0


@pytest.mark.parametrize("wrong", [0.0, math.nan, 2.0])
def test_a_wrong_result_aborts_the_suite(on_cpu, monkeypatch, wrong):
    right = baselines.Inputs.ours

    def ours(self):
        right(self)
        self.d[1] *= wrong

    monkeypatch.setattr(baselines.Inputs, "ours", ours)
    with pytest.raises(AssertionError, match="fp8_gemm_nt 5x32x256"):
        dense.run_dense([Case(5, 32, 256)], StillTimer(), device="cpu")


@pytest.mark.parametrize("m", [1, 5])
def test_scales_of_the_block_baseline_have_the_strides_that_torch_asks_for(m):
    scales = torch.randn(m, 3)
    copy = baselines._mn_major(scales, m)
    assert copy.stride() == (1, m)
    assert torch.equal(copy, scales)
    padded = baselines._mn_major(scales.T, 4, padded=True)
    assert (padded.shape, padded.stride()) == ((4, m), (1, 4))
    assert torch.equal(padded[:3], scales.T)


def test_compile_times_need_no_gpu():
    rows = run_compile([Case(64, 576, 7168)], repeats=1)
    assert [row["op"] for row in rows] == ["compile", "compile all listed m"]
    assert rows[0]["us"] == rows[1]["us"] > 0
    assert rows[1]["groups"] == 1


def test_search_reads_configs_in_both_forms(tmp_path):
    path = tmp_path / "configs.json"
    short = {"block_m": 128, "block_n": 128, "num_consumers": 2}
    path.write_text(json.dumps([short]))
    (config,) = search.load_configs(path)
    assert (config.block_m, config.num_consumers) == (128, 2)
    full = {name.lower(): value for name, value in config.constants().items()}
    path.write_text(json.dumps([{name: full[name] for name in config.__slots__}]))
    assert search.load_configs(path) == [config]


def test_search_leaves_out_what_does_not_compile(capsys, monkeypatch):
    configs = search.grid()
    assert len(configs) == len(set(configs)) > 100
    assert {config for config in configs if config.smem_bytes > plan.SMEM_LIMIT} == set()

    def build(kernel, constants):
        if constants["BLOCK_M"] == 256:
            raise CompileError("spills")
        return b""

    monkeypatch.setattr(search.jit, "build", build)
    built = search.compiled(configs)
    assert built == [config for config in configs if config.block_m < 256]
    assert "spills" in capsys.readouterr().out


def result_rows():
    """Rows as a run would give them: ours 10 % faster than the peer's per-tensor figures."""
    rows = []
    for case in dense_cases():
        peer = next(row for row in peers()["dense"] if Case(row["m"], row["n"], row["k"]) == case)
        us = 0.9 * peer["cublaslt_tensor_us"]
        rows.append(
            results.gemm_row(
                case,
                Figures(us, us, us),
                peer["cublaslt_tensor_us"],
                cublaslt_block_us=peer.get("cublaslt_block_us"),
                sm_mhz=1800,
                power_w=600.0,
            )
        )
    return rows


def test_readme_table_is_made_from_the_result_files(tmp_path):
    rows = result_rows()
    meta = results.make_meta("python -m x", 150.0, "abc1234")
    results.save(tmp_path / "h200_dense.json", meta, rows)
    results.save(tmp_path / "h200_sustained.json", meta, rows[:1])
    host = [results.make_row("fp8_gemm_nt", Figures(6.5, 6.0, 7.0))]
    results.save(tmp_path / "h200_host.json", meta, host)
    text = table.render(tmp_path)
    assert "| m <= 64 | 27 | **0.90** | 0.90 (" in text
    assert "| all | 72 | **0.90** | | 1.22 | |" in text
    assert "commit abc1234" in text
    assert "1800 MHz | 600 W" in text
    assert "fp8_gemm_nt 6.5" in text


def test_table_replaces_only_what_stands_between_the_markers():
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    assert table.rewrite(text, "new") == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"
    assert table.rewrite(table.rewrite(text, "new"), "old") == text
    with pytest.raises(ValueError, match="lacks the marker"):
        table.rewrite("nothing", "new")


def test_readme_shows_the_committed_results():
    readme = (results.ROOT / "README.md").read_text()
    assert table.rewrite(readme, table.render(results.RESULTS)) == readme


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    paths = plots.plot(result_rows(), tmp_path, "title")
    assert [path.name for path in paths] == ["roofline.png", "ratios.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("suite", ["dense", "sustained", "host", "quantize"])
def test_suites_that_need_a_gpu_say_so(suite):
    result = CliRunner().invoke(run.app, [suite])
    assert result.exit_code == 2
    assert "needs a Hopper GPU" in result.output


def test_compile_suite_writes_its_file(tmp_path):
    path = tmp_path / "compile.json"
    options = ["compile", "--shapes", "64x576x7168", "--out", str(path), "--commit", "abc"]
    result = CliRunner().invoke(run.app, options)
    assert result.exit_code == 0, result.output
    meta, rows = results.load(path)
    assert meta["commit"] == "abc"
    assert len(rows) == 2


def test_an_unknown_shape_is_explained():
    result = CliRunner().invoke(run.app, ["compile", "--shapes", "nonsense"])
    assert result.exit_code == 2
    assert "nonsense" in result.output
