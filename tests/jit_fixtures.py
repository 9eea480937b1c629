"""Fixtures of the tests of `deep_gemm.jit`, which name this file in `pytest_plugins`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from jit_tools import write_kernels

from deep_gemm import config, jit
from deep_gemm.jit import codegen


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> Path:
    """A directory with the kernels of `BODIES`, which take the place of the real ones."""
    root = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr(codegen, "KERNELS", root)
    return root


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory that does not exist yet; nothing of the environment or memory leaks in."""
    for name in [name for name in os.environ if name.startswith("DG_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "cache"
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(path))
    _forget()
    yield path
    _forget()


def _forget() -> None:
    jit.forget()
    jit._counters.clear()
    config.warn_once.cache_clear()
