"""Settings: names, values, errors, and when they are read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from deep_gemm.config import Settings, settings, warn_once


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("DG_")]:
        monkeypatch.delenv(name)
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


def test_defaults() -> None:
    fresh = Settings()
    assert fresh.backend == "auto"
    assert fresh.jit_use_nvrtc is True
    assert fresh.jit_cpp_standard == 17
    assert fresh.jit_nvcc_compiler == ""
    assert (fresh.num_sms, fresh.tc_util, fresh.pdl, fresh.mk_alignment) == (0, 100, False, 128)
    flags = ("print_configs", "jit_debug", "jit_disable_cache", "jit_ptxas_verbose", "jit_dump_ptx")
    assert not any(getattr(fresh, flag) for flag in flags)


@pytest.mark.parametrize(
    ("variable", "text", "attribute", "value"),
    [
        ("DG_BACKEND", "reference", "backend", "reference"),
        ("DG_BACKEND", "SM90", "backend", "sm90"),
        ("DG_JIT_USE_NVRTC", "0", "jit_use_nvrtc", False),
        ("DG_JIT_DEBUG", "1", "jit_debug", True),
        ("DG_JIT_DEBUG", "true", "jit_debug", True),
        ("DG_JIT_DEBUG", "False", "jit_debug", False),
        ("DG_JIT_CPP_STANDARD", "20", "jit_cpp_standard", 20),
        ("DG_JIT_OVERRIDE_CPP_STANDARD", "20", "jit_cpp_standard", 20),
        ("DG_JIT_NVCC_COMPILER", "/opt/nvcc", "jit_nvcc_compiler", "/opt/nvcc"),
        ("DG_NVCC_COMPILER", "/opt/nvcc", "jit_nvcc_compiler", "/opt/nvcc"),
        ("DG_PTXAS_VERBOSE", "1", "jit_ptxas_verbose", True),
        ("DG_JIT_PRINT_NVCC_COMMAND", "1", "jit_print_compiler_command", True),
        ("DG_NSYS_PROFILING", "1", "use_nvidia_tools", True),
        ("DG_CACHE_DIR", "/data/kernels", "jit_cache_dir", Path("/data/kernels")),
    ],
)
def test_variable_is_read_at_use(
    variable: str, text: str, attribute: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = getattr(settings, attribute)
    monkeypatch.setenv(variable, text)
    assert getattr(settings, attribute) == value
    monkeypatch.setenv(variable, "")  # as good as unset
    assert getattr(settings, attribute) == before


def test_todays_name_wins_over_the_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_CACHE_DIR", "/data/old")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "/data/new")
    assert settings.jit_cache_dir == Path("/data/new")


@pytest.mark.parametrize(
    ("variable", "attribute", "allowed"),
    [
        ("DG_BACKEND", "backend", "auto, sm90, reference"),
        ("DG_JIT_USE_NVRTC", "jit_use_nvrtc", "0, 1, false, true"),
        ("DG_PRINT_CONFIGS", "print_configs", "0, 1, false, true"),
        ("DG_JIT_CPP_STANDARD", "jit_cpp_standard", "17, 20"),
        ("DG_JIT_OVERRIDE_CPP_STANDARD", "jit_cpp_standard", "17, 20"),
    ],
)
def test_bad_value_names_variable_and_allowed_values(
    variable: str, attribute: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "gpu")
    with pytest.raises(ValueError, match=f"{variable} is 'gpu', expected one of {allowed}"):
        getattr(settings, attribute)


def test_unknown_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings.variables()
    monkeypatch.setenv("DG_NO_SUCH_SETTING", "gpu")
    assert settings.variables() == before
    assert before["DG_JIT_USE_NVRTC"] is True
    assert before["DG_JIT_CACHE_DIR"] == ""


def test_backend_can_be_set_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Settings()
    monkeypatch.setenv("DG_BACKEND", "sm90")
    fresh.backend = "reference"
    assert fresh.backend == "reference"
    fresh.backend = None
    assert fresh.backend == "sm90"
    with pytest.raises(ValueError, match="backend is 'cpu', expected one of auto, sm90, reference"):
        fresh.backend = "cpu"


def test_launch_state_is_what_a_launch_depends_on_and_nothing_else() -> None:
    """Calls that repeat are looked up by it: what leaves launches as they are must not show."""
    fresh = Settings()
    before, seen = fresh.launch_state, {fresh.launch_state}
    for name, value, usual in (
        ("num_sms", 8, 0),
        ("pdl", True, False),
        ("backend", "reference", None),
        ("backend", "sm90", None),
    ):
        setattr(fresh, name, value)
        assert fresh.launch_state not in seen, name
        seen.add(fresh.launch_state)
        setattr(fresh, name, usual)
        assert fresh.launch_state == before, name
    for name, value in (("tc_util", 50), ("mk_alignment", 64)):
        setattr(fresh, name, value)
        assert fresh.launch_state == before, name
    hash(before)


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert settings.jit_cache_dir == Path("/home/somebody/.cache/deep_gemm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/data/cache")
    assert settings.jit_cache_dir == Path("/data/cache/deep_gemm")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "~/kernels")
    assert settings.jit_cache_dir == Path("/home/somebody/kernels")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "kernels")
    assert settings.jit_cache_dir == tmp_path / "kernels"


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert settings.jit_cache_dir is None


def test_warning_is_given_once() -> None:
    with pytest.warns(RuntimeWarning, match="beware"):
        warn_once("beware")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_once("beware")
