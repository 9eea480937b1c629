"""GPU time per call: the sum of its kernels' durations, read from CUPTI's records.

Before each timed call 512 MB are read, so that its inputs come from memory and no dirty line is
left in L2, whose write-back would compete with the kernel (reading, not writing, is the point).
The flush runs a kernel that no call contains. It separates the calls in the stream's order of
kernels, so nothing needs to be recognised by name but the flush itself.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import DeviceType

FLUSH_BYTES = 512 << 20
REPEATS = 20

Call = Callable[[], object]


@dataclass(frozen=True)
class Figures:
    """Median, 10th and 90th percentile in microseconds."""

    us: float
    p10_us: float
    p90_us: float

    @staticmethod
    def of(samples: Sequence[float]) -> Figures:
        if len(samples) == 1:
            return Figures(samples[0], samples[0], samples[0])
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return Figures(statistics.median(samples), deciles[0], deciles[-1])


@dataclass
class Measurement:
    """Times of calls that ran interleaved; `figures` is filled when the session ends."""

    num_calls: int
    repeats: int
    sm_mhz: int | None = None
    power_w: float | None = None
    figures: list[Figures] = field(default_factory=list)


class L2Flush:
    """Calling it replaces what L2 holds, by reading 512 MB; what it writes is 32 KB."""

    def __init__(self) -> None:
        self._source = torch.zeros(FLUSH_BYTES // 65536, 16384, device="cuda")
        self._sink = torch.empty(len(self._source), device="cuda")

    def __call__(self) -> None:
        torch.amax(self._source, dim=1, out=self._sink)


class Timer:
    """Measures calls on the current CUDA device.

    with timer.session() as session:
        measurement = session.measure([ours, theirs])
    measurement.figures[0].us
    """

    def __init__(self) -> None:
        self.flush = L2Flush()
        self.monitor = GpuMonitor()
        self._flush_kernels = self._learn_flush()

    @contextmanager
    def session(self) -> Iterator[Session]:
        """One profiler session; ending it fills the measurements made in it."""
        session = Session(self.flush, self.monitor)
        with _profiler() as profiler:
            yield session
            self.flush()
            torch.cuda.synchronize()
        calls = split_calls(_gpu_records(profiler), self._flush_kernels)
        session.fill(calls)

    def _learn_flush(self) -> list[str]:
        # The first session of a process can come back empty: hence a few throwaway ones.
        for _ in range(3):
            self.flush()
            torch.cuda.synchronize()
            with _profiler() as profiler:
                self.flush()
                torch.cuda.synchronize()
            if names := [name for name, _ in _gpu_records(profiler)]:
                return names
        raise RuntimeError("the profiler records no GPU activity; another one may be attached")


class Session:
    """The calls of one profiler session; made by `Timer.session`."""

    def __init__(self, flush: Call, monitor: GpuMonitor) -> None:
        self._flush = flush
        self._monitor = monitor
        self._measurements: list[Measurement] = []

    def measure(self, calls: Sequence[Call], repeats: int = REPEATS) -> Measurement:
        """Run the calls in turn, `repeats` times, each after a flush; they are warm already."""
        for _ in range(repeats):
            for call in calls:
                self._flush()
                call()
        measurement = Measurement(len(calls), repeats, *self._monitor.sample())  # the GPU is behind
        torch.cuda.synchronize()
        self._measurements.append(measurement)
        return measurement

    def fill(self, calls: list[list[float]]) -> None:
        """Distribute the calls' kernel times, in order of execution, over the measurements."""
        expected = sum(each.num_calls * each.repeats for each in self._measurements)
        if len(calls) != expected:
            raise RuntimeError(f"the profiler recorded {len(calls)} calls, {expected} were made")
        position = 0
        for each in self._measurements:
            end = position + each.num_calls * each.repeats
            for index in range(each.num_calls):
                mine = calls[position + index : end : each.num_calls]
                if len({len(kernels) for kernels in mine}) != 1 or not mine[0]:
                    raise RuntimeError(
                        f"call {index} ran {[len(kernels) for kernels in mine]} kernels in its "
                        f"{each.repeats} repeats, expected the same number, and not 0, each time"
                    )
                each.figures.append(Figures.of([sum(kernels) for kernels in mine]))
            position = end


def split_calls(records: Sequence[tuple[str, float]], flush: Sequence[str]) -> list[list[float]]:
    """Durations of the kernels between two flushes, for each call.

    Args:
        records: (name, microseconds) of all GPU activity, in the stream's order; it begins and ends
            with a flush.
        flush: the names that one flush leaves; the last one occurs nowhere else.
    """
    marks = [index for index, (name, _) in enumerate(records) if name == flush[-1]]
    before = len(flush) - 1
    for mark in marks:
        if [name for name, _ in records[mark - before : mark]] != list(flush[:-1]):
            raise RuntimeError(f"a flush left other records than {flush}: {records[:8]}")
    return [
        [us for _, us in records[mark + 1 : following - before]]
        for mark, following in itertools.pairwise(marks)
    ]


def _profiler() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


def _gpu_records(profiler: Any) -> list[tuple[str, float]]:
    """(name, microseconds) of kernels, copies and fills, in order of their start."""
    events = [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]
    events.sort(key=lambda event: event.start_ns())
    return [(event.name(), event.duration_ns() / 1e3) for event in events]


class GpuMonitor:
    """SM clock and power draw of the current device, by NVML, else by nvidia-smi."""

    def __init__(self) -> None:
        self._uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            self._nvml = pynvml
        except Exception:  # no package, no library, or a container that hides the device from it
            self._nvml = None

    def sample(self) -> tuple[int | None, float | None]:
        """(MHz, W) now; None where neither way works."""
        try:
            return self._from_nvml() if self._nvml is not None else self._from_smi()
        except Exception:  # a figure beside the measurement is not worth losing it
            return None, None

    def _from_nvml(self) -> tuple[int, float]:
        nvml = self._nvml
        mhz = nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)
        # the plain power query averages over a second on recent GPUs
        reading = nvml.nvmlDeviceGetFieldValues(self._handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
        instant = reading.value.uiVal if reading.nvmlReturn == 0 else None
        return mhz, (instant or nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3

    def _from_smi(self) -> tuple[int, float]:
        query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        command = ["nvidia-smi", "-i", self._uuid, *query]
        mhz, watts = subprocess.check_output(command, text=True, timeout=5).split(",")
        return int(mhz), float(watts)
