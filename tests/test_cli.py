"""The command `deep-gemm`."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import deep_gemm
from deep_gemm import cli, plan


@pytest.fixture(autouse=True)
def cache_directory(monkeypatch, tmp_path):
    directory = tmp_path / "cache"
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(directory))
    deep_gemm.jit.forget()
    return directory


def invoke(*arguments):
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_show_config_tells_the_plan():
    plan = json.loads(invoke("show-config", "4096", "7168", "2048", "--num-sms", "132", "--json"))
    assert plan["launch"]["grid"] <= 132
    assert plan["kernel"]["block_m"] in (64, 128, 192, 256)
    text = invoke("show-config", "4096", "7168", "2048")
    assert f"{plan['kernel']['block_m']} x {plan['kernel']['block_n']}" in text
    assert "not yet" in text


@pytest.mark.parametrize(
    ("sizes", "name"), [(("0", "64", "64"), "m"), (("1", "12", "64"), "n"), (("1", "8", "8"), "k")]
)
def test_sizes_that_no_kernel_takes_are_explained(monkeypatch, capsys, sizes, name):
    monkeypatch.setattr(sys, "argv", ["deep-gemm", "show-config", *sizes])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 1
    assert f"ValueError: {name} is {sizes['mnk'.index(name)]}" in capsys.readouterr().err


def test_collect_env_tells_versions_and_settings(monkeypatch, cache_directory):
    monkeypatch.setenv("DG_PRINT_CONFIGS", "1")
    facts = json.loads(invoke("collect-env", "--json"))
    assert facts["deep-gemm-py"] == deep_gemm.__version__
    assert facts["cache"] == str(cache_directory)
    assert facts["DG_PRINT_CONFIGS"] is True
    assert "NVRTC" in facts["compiler"]
    assert "torch" in invoke("collect-env")


def test_collect_env_reports_a_setting_that_is_wrong(monkeypatch):
    monkeypatch.setenv("DG_BACKEND", "foo")
    facts = json.loads(invoke("collect-env", "--json"))
    assert "foo" in facts["backend"] and "foo" in facts["settings"] and facts["torch"]


def test_paths_are_printed_as_they_are(monkeypatch, tmp_path):
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "[bold]"))
    assert "[bold]" in invoke("cache", "list").replace("\n", "")


def test_show_config_of_groups():
    shown = json.loads(invoke("show-config", "8", "4096", "7168", "--groups", "32", "--json"))
    assert shown["kernel"]["is_grouped"] and shown["kernel"]["block_m"] == 64
    assert "32 groups" in invoke("show-config", "8", "4096", "7168", "--groups", "32")


def test_precompile_of_grouped_kernels():
    result = json.loads(invoke("precompile", "576", "512", "--grouped", "--json"))
    assert result["kernels"] == len(plan.GROUPED_CANDIDATES)


def test_precompile_fills_the_cache_and_clear_empties_it(cache_directory):
    options = ("precompile", "576", "512", "--max-m", "64", "--json")
    first = json.loads(invoke(*options))
    assert first["kernels"] == first["compiled"] > 0
    assert json.loads(invoke(*options))["compiled"] == 0
    entries = json.loads(invoke("cache", "list", "--json"))
    assert len(entries) == first["kernels"]
    assert all(entry["directory"] == str(cache_directory) for entry in entries)
    assert entries[0]["entry"] in invoke("cache", "list")

    (cache_directory / "notes.txt").write_text("not an entry")
    assert f"deleted {first['kernels']} kernels" in invoke("cache", "clear")
    assert [path.name for path in cache_directory.iterdir()] == ["notes.txt"]
    assert json.loads(invoke("cache", "list", "--json")) == []


def test_bench_passes_its_arguments_on():
    assert "quantize" in invoke("bench", "--help")
    assert "--shapes" in invoke("bench", "compile", "--help")


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "deep_gemm", "show-config", "1", "64", "128", "--json"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(output)["launch"]["grid"] >= 1
