"""A script: `GpuMoELayer` on ranks that are processes, in Triton's interpreter, with shared memory for a heap.

`python -m tests.gpu.process_ranks FILE` prints the largest error beside fp64 of each rank; TRITON_INTERPRET=1 must be
in the environment. FILE is where the processes of torch.distributed meet.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import tileweave as tw
from benchmarks.gpu_check import error_of, random_batch, random_layer
from tileweave.codegen.gpu.heaps import GpuAllocation, GpuHeap
from tileweave.moe.baselines import reference_moe
from tileweave.moe.config import MoEConfig, local_experts
from tileweave.moe.kernels import Tiles

CONFIG = MoEConfig(hidden=64, intermediate=32, num_experts=5, num_topk=2)
RUN = tw.Config(workers=1, tunables={"tiles": Tiles(16, 64, 64, 16, 64)})
WORLD_SIZE = 2


class SharedHeap(GpuHeap):
    """The shared memory of CPU ranks, as a GPU heap whose ranks are processes."""

    home = "shm"

    def __init__(self, ranks: tw.Group) -> None:
        super().__init__(torch.device("cpu"), ranks.world_size, ranks.rank, 1)
        self.ranks, self.group = ranks, dist.group.WORLD

    def _allocate(self, name: str, nbytes: int) -> GpuAllocation:
        found = self.ranks.heap.allocate(name, nbytes)
        return GpuAllocation(name, nbytes, self.first, found.addresses, (torch.from_numpy(found.local()),))


def rank_main(ranks: tw.Group, file: str) -> float:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=ranks.rank, world_size=ranks.world_size)
    experts = local_experts(CONFIG.num_experts, WORLD_SIZE, ranks.rank)
    layer = tw.moe.GpuMoELayer(
        CONFIG, SharedHeap(ranks), [random_layer(CONFIG, experts, "cpu")], num_tokens=12, run=RUN
    )
    every, errors = random_layer(CONFIG, range(CONFIG.num_experts), "cpu"), []
    for seed in range(2):
        batch = random_batch(CONFIG, [12, 5], "skewed", "cpu", seed)
        x, index, scale = (each[ranks.rank] for each in (batch.x, batch.index, batch.scale))
        (got,) = layer([x], [index], [scale])
        layer.check()
        errors.append(error_of(reference_moe(x, index, scale, every, CONFIG), got))
    dist.destroy_process_group()
    return max(errors)


if __name__ == "__main__":
    print(*tw.spawn(rank_main, WORLD_SIZE, sys.argv[1]))
