"""Operands, guarded outputs and the oracle for tests of the dense GEMM; defects to plant in it."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import deep_gemm
from deep_gemm.gemm import run_dense
from deep_gemm.jit import codegen
from deep_gemm.plan import CANDIDATES, make_config
from deep_gemm.reference import gemm_nt_f64
from deep_gemm.testing import compare
from deep_gemm.types import KernelConfig

FP8 = torch.float8_e4m3fn
Pair = tuple[torch.Tensor, torch.Tensor]
Gemm = Callable[[Any, Any, torch.Tensor], None]

# Every kernel that a plan may choose, then what none chooses today but the kernel can do: clusters
# along M, clusters of small tiles, two weight scales at other places, a pipeline of two stages.
CONFIGS = [candidate.config for candidate in CANDIDATES] + [
    make_config(192, 128, 3, cluster_m=2),
    make_config(128, 96, 2, cluster_m=2),
    make_config(128, 96, 2, cluster_n=2),
    make_config(64, 32, 1, cluster_m=2, num_partials=4),
    make_config(64, 64, 1, cluster_n=2, num_partials=4),
    make_config(128, 80, 2),
    make_config(192, 112, 3),
    make_config(256, 128, 2, num_stages=2),
    make_config(64, 128, 1, num_stages=2, num_partials=2),
]


def config_id(config: KernelConfig) -> str:
    cluster = f"-cluster{config.cluster_m}x{config.cluster_n}" if config.cluster_size > 1 else ""
    return f"{config.block_m}x{config.block_n}x{config.num_stages}{cluster}"


def blocks(size: int) -> int:
    return -(-size // 128)


class Operands(NamedTuple):
    """A and B with their scales, in layouts that the kernels load as they are."""

    a: Pair
    b: Pair

    @property
    def sizes(self) -> tuple[int, int, int]:
        (m, k), n = self.a[0].shape, len(self.b[0])
        return m, n, k

    def oracle(self) -> torch.Tensor:
        """float64 [m, n]."""
        return gemm_nt_f64(*self.a, *self.b)


def make_operands(
    m: int, n: int, k: int, fill: str = "normal", seed: int = 0, device: str = "cuda"
) -> Operands:
    """Operands whose rows are further apart than they are wide, with NaN in all that is between.

    `fill`: "normal"; "exponents" (all finite bytes, scales of 2**-12 to 2**12); "zeros" (zero
    blocks and a zero row); "outliers" (rows and blocks a thousand times larger); "tiny" (scales of
    1e-30); "integers" (results that every exact-enough kernel rounds alike, to the last bit).
    """
    generator = torch.Generator(device).manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def data(rows: int) -> torch.Tensor:
        if fill == "integers":
            return (rand(rows, k) * 9 - 4.5).round().to(FP8)
        if fill == "exponents":
            codes = torch.randint(
                0, 256, (rows, k), generator=generator, device=device, dtype=torch.uint8
            )
            return torch.where((codes & 0x7F) == 0x7F, codes ^ 1, codes).view(FP8)
        values = torch.randn(rows, k, generator=generator, device=device) * 96
        return values.clamp(-448, 448).to(FP8)

    def scales(rows: int) -> torch.Tensor:
        if fill == "integers":
            return torch.exp2((rand(rows, blocks(k)) * 4 - 2).round())
        if fill == "exponents":
            return torch.exp2((rand(rows, blocks(k)) * 24 - 12).round())
        return torch.exp2(rand(rows, blocks(k)) * 4 - 2) / 448

    a, b, sfa, sfb = data(m), data(n), scales(m), scales(blocks(n))
    if fill == "zeros":
        block = torch.arange(k, device=device) // 128
        for rows, matrix in ((1, a), (128, b)):
            row = torch.arange(len(matrix), device=device)[:, None] // rows
            matrix.view(torch.uint8).masked_fill_(row % 3 == block % 3, 0)
        a[m // 2].view(torch.uint8).zero_()
    elif fill == "outliers":
        sfa[::7] *= 1e3
        sfb[:, ::3] *= 1e3
        sfb[-1] *= 1e3
    elif fill == "tiny":
        sfa *= 1e-30
    return Operands((_spread(a), native_with_nan(sfa)), (_spread(b), _followed_by_nan(sfb)))


def _spread(data: torch.Tensor, padding: int = 32) -> torch.Tensor:
    rows, k = data.shape
    buffer = torch.full((rows + 2, k + padding), 0x7F, dtype=torch.uint8, device=data.device)
    view = buffer[:rows, :k].view(FP8)
    view.copy_(data)
    return view


def native_with_nan(sfa: torch.Tensor) -> torch.Tensor:
    """`sfa` [m, k-blocks], MN-major and TMA-aligned, with NaN in the gaps and behind."""
    m, k_blocks = sfa.shape
    shape = k_blocks + 1, -(-m // 4) * 4 + 4
    buffer = torch.full(shape, math.nan, dtype=torch.float32, device=sfa.device)
    buffer[:k_blocks, :m] = sfa.t()
    return buffer.t()[:m, :k_blocks]


def _followed_by_nan(sfb: torch.Tensor) -> torch.Tensor:
    buffer = torch.full((sfb.numel() + 256,), math.nan, dtype=torch.float32, device=sfb.device)
    view = buffer[: sfb.numel()].view(sfb.shape)
    view.copy_(sfb)
    return view


class GuardedOutput:
    """D [m, n], full of NaN, inside a larger buffer that nobody may write to."""

    _GUARD = 0x5AA5

    def __init__(self, m: int, n: int, device: str = "cuda") -> None:
        shape = m + 80, n + 24  # rows for a wave of wgmma beyond D's last one
        self._buffer = torch.full(shape, self._GUARD, dtype=torch.int16, device=device)
        self._inside = slice(16, 16 + m), slice(8, 8 + n)
        self.d = self._buffer.view(torch.bfloat16)[self._inside]
        self.d.view(torch.int16).fill_(-1)  # a NaN

    def check_guard(self) -> None:
        outside = self._buffer.clone()
        outside[self._inside] = self._GUARD
        wrong = (outside != self._GUARD).nonzero()
        assert not len(wrong), (
            f"{len(wrong)} elements outside of D were written, the first at row "
            f"{int(wrong[0, 0]) - self._inside[0].start}, column "
            f"{int(wrong[0, 1]) - self._inside[1].start} of D"
        )


def limits(m: int, n: int) -> dict[str, float]:
    """Limits for `compare`, set as follows.

    Against the unrounded reference the kernel's error is 1.2e-6 to 1.5e-6 (measured on an H200, all
    shapes tried), nearly all of it rounding to bfloat16. `compare` rounds the reference, too, so
    what is left is single elements that the tensor core's 14 bits push over to the next bfloat16:
    2e-7 to 5e-7 by an emulation of its sums. An element that makes up most of a row or of a small
    corner tile and falls so adds (2**-7)**2 / 2 = 3.1e-5, hence the looser limits there. The least
    of the defects in `DEFECTS` below, a wrong rounding mode, gives 8e-6 of the whole.
    """
    one_step = 4e-5
    corner = (m % 128 or 128) * (n % 128 or 128)
    if m < 128 or n < 128:
        corner = min(corner, m * n)
    return {
        "tol": 5e-6 if m * n >= 1024 else one_step,
        "tile_tol": 1e-5 if corner >= 1024 else one_step,
        "row_tol": one_step,
    }


def check(operands: Operands, gemm: Gemm = deep_gemm.fp8_gemm_nt) -> torch.Tensor:
    """Run `gemm` on a guarded D, hold it against the oracle, and return D."""
    m, n, k = operands.sizes
    output = GuardedOutput(m, n, operands.a[0].device.type)
    gemm(*operands, output.d)
    output.check_guard()
    compare(output.d, operands.oracle(), **limits(m, n), name=f"d of m={m}, n={n}, k={k}")
    return output.d


def with_config(config: KernelConfig) -> Gemm:
    return lambda a, b, d: run_dense(a, b, d, config)


class Defect(NamedTuple):
    """One edit of a kernel's source, and where it does harm."""

    name: str
    file: str
    old: str  # occurs once; white space stands for any white space
    new: str
    config: KernelConfig
    sizes: tuple[int, int, int]
    fill: str = "normal"

    def break_kernels(self, root: Path) -> Path:
        return break_kernels(root, self.file, self.old, self.new)


def break_kernels(root: Path, file: str, old: str, new: str) -> Path:
    """Copy the kernels to `root`, with one edit."""
    shutil.copytree(codegen.KERNELS, root)
    path = root / file
    pattern = r"\s+".join(map(re.escape, old.split()))
    text, count = re.subn(pattern, lambda _: new, path.read_text())
    assert count == 1, f"{old!r} is {count} times in {file}: update this defect"
    path.write_text(text)
    return root


_SMALL, _PLAIN, _TALL, _CLUSTER = (
    next(config for config in CONFIGS if key == (config.block_m, config.block_n, config.cluster_n))
    for key in ((64, 32, 1), (128, 128, 1), (256, 128, 2), (192, 128, 2))
)
_TWO_SCALES = next(c for c in CONFIGS if (c.block_m, c.block_n) == (128, 96))
_PRODUCER, _CONSUMER = "producer.cuh", "consumer.cuh"

DEFECTS = [
    Defect("promotion without scale", "promote.cuh",
           "accum[4 * j + 2] += lower * partial[4 * j + 2];",
           "accum[4 * j + 2] += partial[4 * j + 2];", _PLAIN, (300, 520, 1040)),
    Defect("one k-block in 56 skipped", _CONSUMER,
           "promote_wave(accum[wave], partial[wave % IN_FLIGHT], stage, wave, first_columns);",
           "if (count != 17) promote_wave(accum[wave], partial[wave % IN_FLIGHT], stage, wave, "
           "first_columns);", _PLAIN, (256, 512, 7168)),
    Defect("one k-block of a group skipped", _CONSUMER,
           "promote_wave(accum[0], partial[i], stage[i], 0, first_columns);",
           "if (step + i != 5) promote_wave(accum[0], partial[i], stage[i], 0, first_columns);",
           _SMALL, (17, 520, 7168)),
    Defect("scales of rows r and r + 8 swapped", _CONSUMER,
           "r % 2 * 8) * 4);", "(1 - r % 2) * 8) * 4);", _PLAIN, (128, 256, 1024)),
    Defect("scales of another wave", _CONSUMER, "r / 2 * WGMMA_M + r % 2 * 8", "r % 2 * 8",
           _TALL, (256, 256, 512)),
    Defect("scales of another stage", _CONSUMER, "smem_sfb + (stage.idx * 2 + i) * 4",
           "smem_sfb + i * 4", _PLAIN, (128, 256, 1024)),
    Defect("rows stored one further down", _CONSUMER,
           "epilogue.store(&args.tensor_map_d, accum[wave], tile.m + row, tile.n);",
           "epilogue.store(&args.tensor_map_d, accum[wave], tile.m + row + 1, tile.n);",
           _PLAIN, (256, 256, 256)),
    Defect("second weight scale comes too late", _CONSUMER, "= 128 - tile.n % 128;",
           "= 160 - tile.n % 128;", _TWO_SCALES, (128, 576, 512)),
    Defect("second weight scale is the first", _PRODUCER,
           "min(row + i, last_row)", "min(row, last_row)",
           _TWO_SCALES, (128, 576, 512)),
    Defect("weight scale of the neighbour", _PRODUCER,
           "row = tile.n / 128;", "row = tile.n / Config::BLOCK_N;",
           _SMALL, (64, 512, 512)),
    Defect("tail of K left out", "fp8_gemm_1d2d.cuh", "(args.shape_k + BLOCK_K - 1) / BLOCK_K",
           "args.shape_k / BLOCK_K", _PLAIN, (130, 136, 7168 + 16)),
    Defect("last tile left out", "scheduler.cuh", "if (unit_idx >= num_m_units * num_n_units)",
           "if (unit_idx + 1 >= num_m_units * num_n_units)", _PLAIN, (4096, 4096, 128)),
    Defect("swizzle of D left out", "epilogue.cuh",
           "offset ^ ((offset >> 7) % (ROW_BYTES / 16) << 4)", "offset", _PLAIN, (128, 128, 128)),
    Defect("sum of the tile before kept in the tensor core", _CONSUMER,
           "wgmma_descriptor(b + k * (WGMMA_K / 16)), k > 0);",
           "wgmma_descriptor(b + k * (WGMMA_K / 16)), true);", _PLAIN, (128, 128, 1024)),
    Defect("a quarter of a k-block read twice", _CONSUMER,
           "wgmma_descriptor(a + k * (WGMMA_K / 16))",
           "wgmma_descriptor(a + k % 3 * (WGMMA_K / 16))", _PLAIN, (128, 128, 1024)),
    Defect("shares of A swapped in a cluster", _PRODUCER, "rank.n * A_ROWS * BLOCK_K;",
           "(Config::CLUSTER_N - 1 - rank.n) * A_ROWS * BLOCK_K;", _CLUSTER, (192, 256, 512)),
    Defect("edge of A loaded from one row further up", _PRODUCER,
           "m_a = tile.m + rank.n * A_ROWS,",
           "m_a = tile.m + rank.n * A_ROWS - (tile.rows < Config::BLOCK_M && tile.m > 0),",
           _PLAIN, (193, 128, 256)),
    Defect("edge of B loaded from one row further up", _PRODUCER,
           "n_b = tile.n + rank.m * B_ROWS;",
           "n_b = tile.n + rank.m * B_ROWS - "
           "(tile.n + Config::BLOCK_N > args.shape_n && tile.n > 0);", _PLAIN, (128, 264, 256)),
    Defect("edge of the scales loaded from the rows before", _PRODUCER,
           "sf_column = tile.sf_column / 4 * 4;",
           "sf_column = tile.sf_column / 4 * 4 - (tile.rows < Config::BLOCK_M) * 4;",
           _PLAIN, (193, 128, 256)),
    Defect("truncation instead of rounding", "ptx/matrix.cuh", "cvt.rn.bf16x2.f32",
           "cvt.rz.bf16x2.f32", _PLAIN, (256, 512, 1024)),
    Defect("half of the accumulator's bits", "promote.cuh",
           "accum[4 * j + 0] += upper * partial[4 * j + 0];",
           "accum[4 * j + 0] = __uint_as_float(__float_as_uint(accum[4 * j + 0] + upper * "
           "partial[4 * j + 0]) & 0xFFFF0000);", _PLAIN, (256, 512, 7168)),
]  # fmt: skip
