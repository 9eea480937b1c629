"""The disk cache: keys, damaged entries, races, and directories that cannot or must not be used."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest
from jit_tools import start_python, write_kernels

from deep_gemm import jit
from deep_gemm.jit import cache, codegen, compiler
from deep_gemm.jit.codegen import make_source

pytest_plugins = ["jit_fixtures"]
pytestmark = pytest.mark.usefixtures("kernels")

FILL = ("fill", {"VALUE": 7})
NOBODY = 65534


def build_anew() -> bytes:
    """Build as a process that has just started would."""
    jit.forget()
    return jit.build(*FILL)


def the_file(directory: Path, suffix: str) -> Path:
    (path,) = directory.glob(f"fill-*{suffix}")
    return path


# Keys


def key_of(root: Path | None = None, value: int = 7, version: str = "NVRTC 13.0") -> str:
    return cache.key(make_source("fill", {"VALUE": value}, root), compiler.options(), version)


def test_key_does_not_depend_on_place_or_date(tmp_path: Path) -> None:
    elsewhere = tmp_path / "another" / "place"
    write_kernels(elsewhere)
    for path in elsewhere.rglob("*.cuh"):
        os.utime(path, (0, 0))
    assert key_of(elsewhere) == key_of()


def test_moved_installation_hits(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = jit.build(*FILL)
    moved = kernels.rename(kernels.with_name("moved"))
    monkeypatch.setattr(codegen, "KERNELS", moved)
    assert build_anew() == code
    assert jit.counters() == {"memory_hits": 0, "disk_hits": 1, "compiled": 1}


@pytest.mark.parametrize("name", ["fill.cuh", "parts/value.cuh", "parts/offset.cuh"])
def test_key_depends_on_every_header(name: str, kernels: Path) -> None:
    before = key_of()
    with (kernels / name).open("a") as file:
        file.write("// \n")
    assert key_of() != before


def test_key_does_not_depend_on_headers_that_are_not_included(kernels: Path) -> None:
    before = key_of()
    (kernels / "spill.cuh").unlink()
    assert key_of() == before


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DG_JIT_CPP_STANDARD", "20"), ("DG_JIT_WITH_LINEINFO", "1"), ("DG_JIT_PTXAS_CHECK", "1")],
)
def test_key_depends_on_options(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of()
    monkeypatch.setenv(variable, value)
    assert key_of() != before


def test_key_depends_on_constants_compiler_and_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key_of(), key_of(value=8), key_of(version="NVRTC 12.9"), key_of(version="nvcc 13.0.88")}
    monkeypatch.setattr(cache, "_SCHEMA", 0)
    assert len(keys | {key_of()}) == 5


# Entries


def test_entry_is_source_cubin_and_checksum(cache_dir: Path) -> None:
    code = jit.build(*FILL)
    cubin = the_file(cache_dir, ".cubin")
    assert cubin.read_bytes() == code
    assert the_file(cache_dir, ".cu").read_text() == make_source(*FILL).text
    expected = f"{hashlib.sha256(code).hexdigest()}  {cubin.name}\n"
    assert the_file(cache_dir, ".sha256").read_text() == expected
    assert {path.suffix for path in cache_dir.iterdir()} <= {".cu", ".cubin", ".sha256", ".lock"}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def write_garbage(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, write_garbage, Path.unlink])
@pytest.mark.parametrize("suffix", [".cubin", ".sha256"])
def test_damaged_entry_is_a_miss_and_is_mended(
    damage: Callable[[Path], None], suffix: str, cache_dir: Path
) -> None:
    code = jit.build(*FILL)
    if (damage, suffix) != (truncate, ".sha256"):  # shorter than that
        damage(the_file(cache_dir, suffix))
    else:
        the_file(cache_dir, suffix).write_text("")
    assert build_anew() == code
    assert jit.counters()["compiled"] == 2
    assert build_anew() == code
    assert jit.counters() == {"memory_hits": 0, "disk_hits": 1, "compiled": 2}


def test_checksum_of_another_entry_is_a_miss(cache_dir: Path) -> None:
    jit.build(*FILL)
    path = the_file(cache_dir, ".sha256")
    path.write_text(path.read_text().replace("fill", "pill"))
    build_anew()
    assert jit.counters()["compiled"] == 2


def test_disabled_cache_touches_no_disk(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_JIT_DISABLE_CACHE", "1")
    build_anew()
    build_anew()
    assert jit.counters() == {"memory_hits": 0, "disk_hits": 0, "compiled": 2}
    assert not cache_dir.exists()


def test_directory_is_read_at_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.build(*FILL)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "not" / "made" / "yet"))
    build_anew()
    assert jit.counters()["compiled"] == 2
    assert the_file(tmp_path / "not" / "made" / "yet", ".cubin").exists()


def test_cache_removed_while_in_use(cache_dir: Path) -> None:
    code = jit.build(*FILL)
    shutil.rmtree(cache_dir)
    assert build_anew() == code
    assert the_file(cache_dir, ".cubin").exists()


# Several processes

RACE = """
import json, os, time
from pathlib import Path
from deep_gemm import jit
from deep_gemm.jit import codegen, compiler, cubin
codegen.KERNELS = Path(os.environ["ROOT"])
{prepare}
compiler.compiler_version()  # load the compiler before the start
Path(os.environ["START"], str(os.getpid())).touch()
while not Path(os.environ["START"], "go").exists():
    time.sleep(0.001)
code = jit.build("fill", {{"VALUE": 7}})
assert "fill" in cubin.kernels(code)
print(json.dumps([jit.counters()["compiled"], code.hex()]))
"""
NO_LOCKS = """
import filelock
def fail(*args, **kwargs):
    raise NotImplementedError("no locks on this file system")
filelock.FileLock.acquire = fail
"""


def race(kernels: Path, start: Path, prepare: str) -> tuple[int, set[str]]:
    """Let 8 processes build on a cold cache: how many compiled, and what they ended with."""
    import json

    start.mkdir()
    processes = [
        start_python(RACE.format(prepare=prepare), ROOT=str(kernels), START=str(start))
        for _ in range(8)
    ]
    deadline = time.monotonic() + 60
    while len(list(start.iterdir())) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    (start / "go").touch()
    results = []
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert errors == ""
        results.append(json.loads(output))
    return sum(compiled for compiled, _ in results), {code for _, code in results}


def test_eight_processes_on_a_cold_cache_compile_once(
    kernels: Path, tmp_path: Path, cache_dir: Path
) -> None:
    compiled, codes = race(kernels, tmp_path / "start", prepare="")
    assert compiled == 1
    assert codes == {the_file(cache_dir, ".cubin").read_bytes().hex()}


def test_eight_processes_where_locks_do_not_work(
    kernels: Path, tmp_path: Path, cache_dir: Path
) -> None:
    compiled, codes = race(kernels, tmp_path / "start", prepare=NO_LOCKS)
    assert 1 <= compiled <= 8
    assert codes == {the_file(cache_dir, ".cubin").read_bytes().hex()}
    assert not list(cache_dir.glob(".*")), "temporary files are left"
    build_anew()
    assert jit.counters() == {"memory_hits": 0, "disk_hits": 1, "compiled": 0}


def test_lock_of_a_stuck_process_is_not_waited_for_forever(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_LOCK_SECONDS", 0.1)
    cache_dir.mkdir()
    source = make_source(*FILL)
    with filelock.FileLock(cache_dir / f"{jit._entry(source)}.lock"):
        jit.build(*FILL)
    assert the_file(cache_dir, ".cubin").exists()


def test_winner_is_seen_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    code = build_anew()
    load, calls = cache.load, []

    def late(entry: str) -> bytes | None:
        calls.append(entry)
        return load(entry) if len(calls) > 1 else None

    monkeypatch.setattr(cache, "load", late)
    assert build_anew() == code
    assert jit.counters() == {"memory_hits": 0, "disk_hits": 1, "compiled": 1}


# Directories that cannot be used


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The private directory that stands in, in a directory for temporary files of its own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp" / f"deep_gemm-{os.geteuid()}"


def assert_falls_back_with_one_warning(temporary: Path, reason: str) -> None:
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        code = build_anew()
    assert len(caught) == 1
    assert str(temporary) in str(caught[0].message)
    assert "Set DG_JIT_CACHE_DIR" in str(caught[0].message)
    assert temporary.stat().st_mode & 0o777 == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build_anew() == code
    assert jit.counters() == {"memory_hits": 0, "disk_hits": 1, "compiled": 1}


def test_directory_that_cannot_be_made(
    cache_dir: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir.write_text("a file is in the way")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(cache_dir / "below"))
    assert_falls_back_with_one_warning(temporary, "cache/below .*Not a directory")


def test_directory_that_cannot_be_written(
    cache_dir: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != cache_dir and access(path, mode))
    assert_falls_back_with_one_warning(temporary, "cache .it is not writable")


def test_read_only_directory_is_read(
    cache_dir: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = jit.build(*FILL)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != cache_dir and access(path, mode))
    with pytest.warns(RuntimeWarning, match="not writable"):
        assert build_anew() == code
    assert jit.counters() == {"memory_hits": 0, "disk_hits": 1, "compiled": 1}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to someone else")
@pytest.mark.parametrize(("mode", "is_used"), [(0o777, False), (0o775, False), (0o755, True)])
def test_directory_of_someone_else(
    mode: int, is_used: bool, cache_dir: Path, temporary: Path
) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(mode)
    os.chown(cache_dir, NOBODY, NOBODY)
    if is_used:
        assert cache.places() == ((cache_dir,), cache_dir)
    else:
        assert_falls_back_with_one_warning(temporary, f"it belongs to user {NOBODY}")
        assert cache.places() == ((temporary,), temporary)


def test_nothing_is_read_from_a_directory_that_someone_else_could_write(
    cache_dir: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit.build(*FILL)
    cache_dir.chmod(0o777)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.warns(RuntimeWarning, match=f"it belongs to user {owner}"):
        assert cache.places() == ((), None)  # the private directory, too, would have another owner
    build_anew()
    assert jit.counters()["compiled"] == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to someone else")
def test_planted_private_directory_is_refused(
    cache_dir: Path, temporary: Path, tmp_path: Path
) -> None:
    cache_dir.write_text("a file is in the way")
    (tmp_path / "planted").mkdir()
    temporary.symlink_to(tmp_path / "planted")
    os.chown(temporary, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.warns(RuntimeWarning, match="only as long as this process runs"):
        jit.build(*FILL)
    assert not list((tmp_path / "planted").iterdir())


def test_no_home_directory(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DG_JIT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert_falls_back_with_one_warning(temporary, "there is none")


def test_full_disk(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.warns(RuntimeWarning, match="No space left on device") as caught:
        assert build_anew() == build_anew()
    assert len(caught) == 1
    assert {path.suffix for path in cache_dir.iterdir()} <= {".lock"}
