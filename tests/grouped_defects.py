"""Defects to plant in the grouped kernels, each with a case that must turn red.

None of them may hang: whatever is announced to a barrier still arrives. Where one leaves a part of
shared memory as it was, one CTA has tiles of different groups in turn: what the launch before left
there, an intact one, must not be what belongs there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from dense_tools import break_kernels
from grouped_tools import POISON, GroupedCase, make_case, with_config

import deep_gemm
from deep_gemm.plan import make_config
from deep_gemm.types import KernelConfig


class GroupedDefect(NamedTuple):
    """One edit of a kernel's source, and where it does harm."""

    name: str
    file: str
    old: str  # occurs once; white space stands for any white space
    new: str
    config: KernelConfig
    make: Callable[..., GroupedCase]  # takes `device`
    zero_padding: bool = True
    num_sms: int = 0
    launches: int = 1  # that follow each other; the last one counts

    def break_kernels(self, root: Path) -> Path:
        return break_kernels(root, self.file, self.old, self.new)

    def run(self, case: GroupedCase, d: torch.Tensor, ensure_zero_padding: bool = True) -> None:
        """A `GroupedGemm`."""
        deep_gemm.set_num_sms(self.num_sms)
        for launch in range(self.launches):
            if launch > 0:
                d.view(torch.int16).fill_(POISON)
            with_config(self.config)(case, d, ensure_zero_padding)


_SMALL = make_config(64, 64, 1, num_partials=4, is_grouped=True)
_PLAIN = make_config(128, 128, 2, num_stages=5, is_grouped=True)
_CLUSTER = make_config(192, 128, 3, cluster_n=2, is_grouped=True)
_PRODUCER, _CONSUMER, _SCHEDULER = "producer.cuh", "consumer.cuh", "grouped_scheduler.cuh"


def late_ids(device: str = "cuda") -> GroupedCase:
    """Blocks of 64 rows whose first rows, or all of them, have no group."""
    ids = [-1] * 40 + [2] * 24 + [0] * 64 + [-1] * 64 + [-1] * 63 + [1]
    return GroupedCase("ids", 3, len(ids), 136, 272, alignment=64, device=device).route(ids)


_masked = partial(make_case, "masked", (65, 0, 1, 130, 7), 264, 528)
_psum = partial(make_case, "psum", (100, 0, 1, 300, 130), 264, 528)
_packed = partial(make_case, "psum", (5, 0, 1, 193, 64, 67), 264, 400, alignment=1)
_ids = partial(make_case, "ids", (100, 0, 1, 300, 130), 264, 528)

GROUPED_DEFECTS = [
    # Which rows are stored
    GroupedDefect("rows past the end of a group stored", _CONSUMER,
                  "if ((stored & valid) == ALL_ROWS) {", "if (stored != 0) {", _PLAIN, _masked),
    GroupedDefect("padding stored as computed", _CONSUMER,
                  "if ((stored & valid) == ALL_ROWS) {", "if (stored == ALL_ROWS) {",
                  _PLAIN, _psum),
    GroupedDefect("valid and stored rows swapped", _CONSUMER, "m, n, valid, stored);",
                  "m, n, stored, valid);", _PLAIN, _psum),
    GroupedDefect("valid rows from another word of the mask", _CONSUMER, "slot.valid[row / 32]",
                  "slot.valid[0]", _PLAIN, _psum),
    GroupedDefect("stored rows from another word of the mask", _CONSUMER,
                  "slot.stored[row / 32]", "slot.stored[0]", _PLAIN, _masked),
    GroupedDefect("stored rows from the other half of a word", _CONSUMER,
                  "slot.stored[row / 32] >> row % 32", "slot.stored[row / 32]", _SMALL,
                  partial(make_case, "masked", (20, 3, 64), 136, 272)),
    GroupedDefect("columns beyond the matrix stored", "epilogue.cuh",
                  "column + 8 * j < args.shape_n", "column + 8 * j < args.shape_n + 8",
                  _PLAIN, _masked),
    GroupedDefect("padding not written", _SCHEDULER, "rows.zero_padding ? inside_mask :", "",
                  _PLAIN, _ids),
    GroupedDefect("padding written unasked", _SCHEDULER, "rows.zero_padding ? inside_mask :",
                  "true ? inside_mask :", _PLAIN, _ids, zero_padding=False),
    GroupedDefect("a warpgroup with one row skipped", _CONSUMER,
                  "tile.rows <= uniform(consumer.first_row)",
                  "tile.rows <= uniform(consumer.first_row) + 1", _PLAIN, _masked),
    # Which operands they take
    GroupedDefect("scales not shifted where groups begin between multiples of four", _CONSUMER,
                  "smem_sfa + tile.sf_column % 4 * 4;", "smem_sfa;", _SMALL, _packed),
    GroupedDefect("scales of A of the first group", _SCHEDULER,
                  "has_groups ? tile.group_idx * num_k_blocks : 0", "0", _PLAIN, _masked),
    GroupedDefect("scales of A of the first tile of a group", _SCHEDULER,
                  "has_groups ? first : tile.m", "has_groups ? 0 : tile.m", _PLAIN, _masked),
    GroupedDefect("weight of the first group", _PRODUCER, "tile.group_idx * args.shape_n + n_b",
                  "n_b", _PLAIN, _ids),
    GroupedDefect("scales of the weight of the first group", _PRODUCER,
                  "int64_t{tile.group_idx} * args.sfb_stride_group", "0", _PLAIN, _psum),
    GroupedDefect("parts of A loaded from eight rows further down", _PRODUCER,
                  "m_a = tile.m + rank.n * A_ROWS,",
                  "m_a = tile.m + rank.n * A_ROWS + (tile.rows < Config::BLOCK_M ? 8 : 0),",
                  _PLAIN, _psum),
    GroupedDefect("parts of A loaded to eight rows further down", _PRODUCER,
                  "dst_a = smem_a + stage * A_BYTES,",
                  "dst_a = smem_a + stage * A_BYTES + (rows_a <= A_ROWS / 2 ? 8 * BLOCK_K : 0),",
                  _PLAIN, partial(make_case, "masked", (7, 20, 7, 30), 136, 528), num_sms=1),
    GroupedDefect("a box of A for fewer rows than there are", _PRODUCER,
                  "if (num_rows <= LARGEST >> i)",
                  "if (num_rows <= (LARGEST >> i) + 1)", _PLAIN,
                  partial(make_case, "masked", (128, 65, 128, 65), 136, 528), num_sms=1),
    GroupedDefect("shares of A swapped in a cluster", _PRODUCER, "rank.n * A_ROWS * BLOCK_K;",
                  "(Config::CLUSTER_N - 1 - rank.n) * A_ROWS * BLOCK_K;", _CLUSTER, _ids),
    # Which tiles there are
    GroupedDefect("the CTAs of a cluster on the same columns", _SCHEDULER,
                  "(n_unit_idx * Config::CLUSTER_N + rank_n)",
                  "(n_unit_idx * Config::CLUSTER_N)", _CLUSTER, _psum),
    GroupedDefect("last unit lost", _SCHEDULER, "window_units = broadcast(units_until, 31);",
                  "window_units = broadcast(units_until, 31); window_units -= window_units > 0;",
                  _PLAIN, _masked),
    GroupedDefect("counter of units not reset", _SCHEDULER,
                  "if (is_drawing() && has_unit) end_drawing();", "", _SMALL, _ids, num_sms=4,
                  launches=2),
    GroupedDefect("two of the units drawn are the same", _SCHEDULER,
                  "unit_idx = num_clusters + broadcast(draw(rows.next_unit), 0);",
                  "unit_idx = max(num_clusters + broadcast(draw(rows.next_unit), 0), "
                  "num_clusters + 1);", _SMALL, _psum, num_sms=4),
    GroupedDefect("places of a wave do not rotate to all", _SCHEDULER,
                  "(place + (num_clusters * 5 / 8 | 1)) % num_clusters;", "place / 2 * 2;",
                  _CLUSTER, _ids, num_sms=6),
    GroupedDefect("groups begin right behind the group before", _SCHEDULER,
                  "first_row = aligned(load_count(is_group & (group_idx > 0u), group_idx - 1u));",
                  "first_row = load_count(is_group & (group_idx > 0u), group_idx - 1u);",
                  _PLAIN, _psum),
    GroupedDefect("blocks judged by their first row", _SCHEDULER,
                  "if (vote(is_open) == 0) break;", "break;", _SMALL, late_ids),
    GroupedDefect("runs end with their window", _SCHEDULER,
                  "num_blocks = Lanes<uint32_t>(used);", "num_blocks = Lanes<uint32_t>(32u);",
                  _PLAIN,
                  partial(make_case, "ids", (1100, 30), 136, 272, alignment=16, wild=False)),
    GroupedDefect("a group between two windows left out", _SCHEDULER, "position += 32;",
                  "position += 33;", _SMALL, partial(make_case, "masked", (1,) * 40, 64, 256)),
]  # fmt: skip
