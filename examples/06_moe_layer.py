"""The prebuilt MoE layer on real input, and the two ways of starting its ranks.

`MoELayer` is an `nn.Module`: router, experts spread over the ranks, and one compiled kernel a rank that
sends, multiplies and combines at the same time. All ranks make it alike and call it together.

*From one process*: `tw.spawn` starts the ranks, hands each its group, and returns their results. For
scripts, notebooks and tests; when a rank fails, all stop and the error is raised here.

    python examples/06_moe_layer.py

*From torchrun*: each rank is a script of its own and joins with `tw.init()`. For training jobs; it
lives beside `torch.distributed` and does not need its process group.

    torchrun --nproc-per-node=2 examples/06_moe_layer.py
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

import tileweave as tw
from tileweave.moe import MoEConfig, MoELayer
from tileweave.moe.cases import layer_case
from tileweave.moe.corpus import byte_embeddings

CONFIG = MoEConfig(hidden=512, intermediate=256, num_experts=16, num_topk=4, dtype=torch.float32)
NUM_TOKENS = 500  # of all ranks


@dataclass(frozen=True)
class Result:
    """What one rank has to tell."""

    out: torch.Tensor
    rows: int
    milliseconds: float


def forward(group: tw.Group) -> Result:
    """One rank's part: some bytes of Python's own sources, embedded, through the layer."""
    world, rank = group.world_size, group.rank
    first, end = NUM_TOKENS * rank // world, NUM_TOKENS * (rank + 1) // world  # ranks may differ in tokens
    x = byte_embeddings(end - first, CONFIG.hidden, seed=0, offset=first)

    layer = MoELayer(CONFIG, group)  # the weights come from a seed; load_experts() takes those of a checkpoint
    assert layer.router is not None
    topk_idx, topk_weights = layer.router(x)  # layer(x) would do this itself
    counts = torch.bincount(topk_idx.flatten(), minlength=CONFIG.num_experts)
    rows = int(group.all_gather(counts.numpy()).sum(axis=0)[layer.placement.experts_of(rank)].sum())

    layer(x, topk_idx, topk_weights)  # the first call compiles, or finds the kernel in the cache
    group.barrier()
    start = time.perf_counter()
    out = layer(x, topk_idx, topk_weights)
    return Result(out, rows, 1e3 * (time.perf_counter() - start))


def report(results: list[Result]) -> torch.Tensor:
    """Print what the ranks tell; the output of all tokens."""
    for rank, result in enumerate(results):
        print(
            f"rank {rank}: {len(result.out)} tokens in, {result.rows} rows to its experts, "
            f"out {list(result.out.shape)}, {result.milliseconds:.1f} ms"
        )
    return torch.cat([result.out for result in results])


def cases(world_size: int = 2) -> list[tw.Case]:
    """The layer's kernel with a small uneven routing."""
    return [layer_case(world_size)]


def main(world_size: int = 2) -> None:
    """Under torchrun be one rank; otherwise start them."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        group = tw.init()
        results = group.all_gather_object(forward(group))
        if group.rank == 0:
            print(f"{group.world_size} ranks under torchrun")
            report(results)
        return
    print(f"{world_size} ranks from tw.spawn")
    out = report(tw.spawn(forward, world_size))
    alone = report(tw.spawn(forward, 1))
    assert torch.equal(out, alone), "the bits depend on the number of ranks"
    print("the same bits on 1 rank: results depend on the tokens alone")


if __name__ == "__main__":
    main()
