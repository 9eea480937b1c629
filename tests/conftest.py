"""Shared by all tests: the `gpu` marker, the hypothesis profile, settings that do not leak."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from deep_gemm.config import settings

hypothesis.settings.register_profile("deep_gemm", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.load_profile("deep_gemm")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a Hopper GPU (compute capability 9.0)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_hopper() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_hopper() -> str | None:
    if not torch.cuda.is_available():
        return "needs a Hopper GPU, torch.cuda is not available"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"needs a Hopper GPU, found {torch.cuda.get_device_name()} ({major}.{minor})"
    return None


@pytest.fixture(autouse=True)
def settings_that_do_not_leak() -> Iterator[None]:
    saved = {name: value for name, value in vars(settings).items() if name != "launch_state"}
    yield
    for name, value in saved.items():
        if getattr(settings, name) != value:
            setattr(settings, name, value)
