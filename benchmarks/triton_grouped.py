# mypy: ignore-errors
"""What a grouped GEMM in plain Triton reaches: the baseline where the peers have no figure.

One program per tile of D, pointer loads, one scale product per 128 channels, as serving engines
have it. Importing this module needs Triton, so the suite does it late.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK_K = 128


class Tile(NamedTuple):
    """One build of the kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


TILES = (
    Tile(16, 32, 4, 5),
    Tile(16, 64, 4, 4),
    Tile(16, 128, 4, 4),
    Tile(16, 128, 8, 5),
    Tile(32, 64, 4, 4),
    Tile(32, 128, 4, 4),
    Tile(64, 64, 4, 5),
    Tile(64, 128, 4, 4),
    Tile(64, 128, 8, 3),
    Tile(128, 64, 4, 4),
    Tile(128, 128, 8, 3),
    Tile(128, 128, 8, 4),
    Tile(128, 128, 4, 3),
)


@triton.jit(do_not_specialize=["m_max", "sfa_stride_group", "sfa_stride_k"])
def grouped_gemm(
    a,  # fp8, contiguous: [num_groups, m_max, k] if MASKED, else [rows, k]
    sfa,  # float32, rows contiguous, else any strides
    b,  # fp8 [num_groups, n, k], contiguous
    sfb,  # float32 [num_groups, n / 128, k / 128], contiguous
    d,  # bf16, contiguous, shaped as A
    row_ends,  # int32 [num_groups]: the row after a group's last, within its m_max rows if MASKED
    tile_groups,  # int32 [tiles along M]: the group of each; None if MASKED
    tile_rows,  # int32 [tiles along M]: the first row of each; None if MASKED
    m_max,
    n,
    k,
    sfa_stride_group,
    sfa_stride_k,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    # Bands of BAND tiles along M: programs that run together share operands in L2.
    n_tiles = n // BLOCK_N
    m_tiles = tl.num_programs(0) // n_tiles
    pid = tl.program_id(0)
    first = pid // (BAND * n_tiles) * BAND
    height = tl.minimum(m_tiles - first, BAND)
    m_tile = first + pid % (BAND * n_tiles) % height
    n_tile = pid % (BAND * n_tiles) // height

    if MASKED:
        tiles_per_group = tl.cdiv(m_max, BLOCK_M)
        group = (m_tile // tiles_per_group).to(tl.int64)
        row = m_tile % tiles_per_group * BLOCK_M
        a += group * m_max * k
        sfa += group * sfa_stride_group
        d += group * m_max * n
    else:
        group = tl.load(tile_groups + m_tile).to(tl.int64)
        row = tl.load(tile_rows + m_tile)
    end = tl.load(row_ends + group)
    if row >= end:
        return

    columns = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    channels = tl.arange(0, BLOCK_K)
    rows = row + tl.arange(0, BLOCK_M)
    rows_read = tl.minimum(rows, end - 1).to(tl.int64)  # a mask would cost more than a repeated row
    a_ptrs = a + rows_read[:, None] * k + channels[None, :]
    b_ptrs = b + group * n * k + columns[None, :] * k + channels[:, None]
    sfa_ptrs = sfa + rows_read
    sfb_ptr = sfb + (group * (n // 128) + n_tile * BLOCK_N // 128) * (k // BLOCK_K)

    accum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(k // BLOCK_K):
        partial = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), out_dtype=tl.float32)
        accum += partial * (tl.load(sfa_ptrs) * tl.load(sfb_ptr))[:, None]
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
        sfa_ptrs += sfa_stride_k
        sfb_ptr += 1

    d_ptrs = d + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(d_ptrs, accum.to(tl.bfloat16), mask=(rows < end)[:, None])


def make_call(
    tile: Tile,
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor,
    groups: torch.Tensor | Sequence[tuple[int, int]],
) -> Callable[[], None]:
    """A call of the kernel, which writes the rows of all groups to `d` and nothing else.

    Args:
        tile: the build to use.
        a, b: FP8 and scales, as `deep_gemm`'s grouped functions take them, with native scales of A.
        d: bf16 output.
        groups: `masked_m` on the device (masked layout), or each group's first and past-last row;
            these are turned into a table of tiles now, not in the call.
    """
    (a_data, sfa), (b_data, sfb) = a, b
    _, n, k = b_data.shape
    if n % 128 or k % 128:
        raise ValueError(f"n, k are {n}, {k}, expected multiples of 128")
    if not (sfa.stride(-2) == 1 or sfa.shape[-2] == 1):
        raise ValueError(f"scales of A have strides {sfa.stride()}, expected 1 along the rows")
    masked = isinstance(groups, torch.Tensor)
    tables: tuple[torch.Tensor | None, ...]
    if isinstance(groups, torch.Tensor):
        num_groups, m_max, _ = a_data.shape
        m_tiles = num_groups * -(-m_max // tile.block_m)
        tables = groups, None, None
    else:
        m_max = 0
        table = [
            (group, row)
            for group, (start, end) in enumerate(groups)
            for row in range(start, end, tile.block_m)
        ]
        m_tiles = len(table)
        columns = [[end for _, end in groups], *zip(*table, strict=True)]
        tables = tuple(torch.tensor(each, dtype=torch.int32, device=d.device) for each in columns)
    grid = (m_tiles * (n // tile.block_n),)
    strides = (sfa.stride(0) if masked else 0), sfa.stride(-1)

    def call() -> None:
        grouped_gemm[grid](
            a_data, sfa, b_data, sfb, d, *tables, m_max, n, k, *strides, **_constants(tile, masked)
        )

    return call


def tiles_for(most_rows: int) -> list[Tile]:
    """The builds worth timing where the largest group has `most_rows` rows."""
    if most_rows <= 64:
        return [tile for tile in TILES if tile.block_m <= 64]
    return [tile for tile in TILES if tile.block_m >= 64]


def precompile(tile: Tile, masked: bool) -> None:
    """Compile one build for one layout; Triton's own compiler runs outside Python's lock."""
    fp8, f32 = torch.float8_e4m3fn, torch.float32
    tables = (torch.int32, None, None) if masked else (torch.int32,) * 3
    grouped_gemm.warmup(
        *(fp8, f32, fp8, f32, torch.bfloat16), *tables, *(128, 128, 128, 128, 128),
        **_constants(tile, masked), grid=(1,),
    )  # fmt: skip


def _constants(tile: Tile, masked: bool) -> dict[str, int]:
    return {
        "MASKED": masked,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": BLOCK_K,
        "BAND": 8,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
