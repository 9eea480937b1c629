"""On the GPU: a watchdog over each test, and kernels that are compiled in parallel."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dense_tools import CONFIGS

from deep_gemm import jit

WATCHDOG_SECONDS = 180


@pytest.fixture(scope="session")
def real_stderr(request: pytest.FixtureRequest) -> Iterator[int]:
    """The descriptor of stderr from before pytest captures it, so that a last word is seen."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        descriptor = os.dup(2)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(autouse=True)
def watchdog(real_stderr: int) -> Iterator[None]:
    """A kernel that hangs ends the run: nothing else would, and the GPU takes no other work."""
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True, file=real_stderr)
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # every later test would fail, for the same reason
        pytest.exit(f"the CUDA context is broken: {error}", returncode=1)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def compiled() -> None:
    """Every kernel of `CONFIGS` is in memory."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda c: jit.build("fp8_gemm_1d2d", c.constants()), CONFIGS))
