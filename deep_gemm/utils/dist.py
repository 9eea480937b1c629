"""Small helpers for scripts that run one process per GPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["dist_print", "init_dist", "uneven_all_gather"]

_local_rank: int | None = None


def init_dist(local_rank: int, num_local_ranks: int) -> tuple[int, int, ProcessGroup]:
    """Join the process group as process `local_rank` of the `num_local_ranks` on this node.

    Reads `MASTER_ADDR` (127.0.0.1), `MASTER_PORT` (8361), `WORLD_SIZE` (number of nodes, 1) and
    `RANK` (of this node, 0). Uses NCCL and makes `cuda:local_rank` current where CUDA is
    available, else gloo. Returns (rank, number of ranks, a group of all ranks).
    """
    from torch import distributed

    global _local_rank
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", "8361"))
    num_nodes = int(os.environ.get("WORLD_SIZE", "1"))
    node_rank = int(os.environ.get("RANK", "0"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    distributed.init_process_group(
        backend="nccl" if on_gpu else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=num_nodes * num_local_ranks,
        rank=node_rank * num_local_ranks + local_rank,
    )
    _local_rank = local_rank
    size = distributed.get_world_size()
    return distributed.get_rank(), size, distributed.new_group(list(range(size)))


def uneven_all_gather(
    tensor: torch.Tensor, dim: int = 0, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Concatenate every rank's `tensor` along `dim`, the only dimension that may differ."""
    from torch import distributed

    num_ranks = distributed.get_world_size(group)
    size = torch.tensor([tensor.shape[dim]], device=tensor.device)
    gathered_sizes = [torch.empty_like(size) for _ in range(num_ranks)]
    distributed.all_gather(gathered_sizes, size, group=group)
    sizes = [int(rank_size) for rank_size in gathered_sizes]

    padded = tensor.movedim(dim, 0)
    padded = padded.new_zeros((max(sizes), *padded.shape[1:]))
    padded[: tensor.shape[dim]] = tensor.movedim(dim, 0)
    parts = [torch.empty_like(padded) for _ in range(num_ranks)]
    distributed.all_gather(parts, padded, group=group)
    whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return whole.movedim(0, dim).contiguous()


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print `s` (on the node's first rank only with `once_in_node`), then wait for every rank."""
    from torch import distributed

    if _local_rank is None:
        raise RuntimeError("dist_print is called before init_dist, which makes the process group")
    if not once_in_node or _local_rank == 0:
        print(f"{s}\n", end="", flush=True)  # one write: lines of ranks do not mix
    distributed.barrier()
