"""Tests in processes of their own: what importing does not do, fork, a process group."""

from __future__ import annotations

import subprocess
import sys


def python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120
    )


def test_c107_importing_and_setting_options_makes_no_cuda_call() -> None:
    code = """
import sys, subprocess, torch

def forbidden(*args, **kwargs):
    raise AssertionError("called at import")

torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = forbidden
torch.cuda.get_device_properties = subprocess.Popen = forbidden
opened = []
sys.addaudithook(lambda name, args: opened.append((name, args)) if name in (
    "os.mkdir", "os.rename", "os.remove", "os.system", "os.fork", "os.posix_spawn") or (
    name == "open" and args[1] and set(args[1]) & set("wax+")) else None)
import deep_gemm
deep_gemm.set_num_sms(64), deep_gemm.set_pdl(True), deep_gemm.set_backend("auto")
assert not torch.cuda.is_initialized()
assert not opened, opened
assert "cuda.bindings.nvrtc" not in sys.modules and "triton" not in sys.modules
"""
    result = python(code, "-B")
    assert result.returncode == 0, result.stderr


def test_c106_import_then_fork_then_use() -> None:
    code = """
import os, threading, torch, deep_gemm
a = deep_gemm.per_token_cast_to_fp8(torch.randn(8, 128), use_ue8m0=False)
b = deep_gemm.per_block_cast_to_fp8(torch.randn(64, 128), use_ue8m0=False)
pid = os.fork()
if pid == 0:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device = "cuda" if hopper else "cpu"
    a, b = ([t.to(device) for t in pair] for pair in (a, b))
    d = torch.full((8, 64), float("nan"), dtype=torch.bfloat16, device=device)
    deep_gemm.fp8_gemm_nt(a, b, d)
    os._exit(1 if d.isnan().any() else 0)
_, status = os.waitpid(pid, 0)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_importing_adds_little_to_importing_torch() -> None:
    code = (
        "import time, torch; t = time.process_time(); import deep_gemm; "
        "print(time.process_time() - t)"
    )
    times = []
    while len(times) < 3 and not any(seconds < 0.1 for seconds in times):
        times.append(float(python(code).stdout))
    assert min(times) < 0.1, times


def test_uneven_all_gather_of_two_processes() -> None:
    code = """
import os, socket, sys, torch
from deep_gemm.utils import dist_print, init_dist, uneven_all_gather
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(free.getsockname()[1])
torch.cuda.is_available = lambda: False
child = os.fork()
rank, size, group = init_dist(int(child == 0), 2)
mine = torch.full((3, rank + 1), rank)
whole = uneven_all_gather(mine, dim=1, group=group)
assert size == 2 and whole.tolist() == [[0, 1, 1]] * 3, whole
dist_print("once", once_in_node=True)
dist_print(f"rank {rank}")
torch.distributed.destroy_process_group()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n")) == ["", "once", "rank 0", "rank 1"]
