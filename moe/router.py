"""Routers: which experts a token goes to, and with what weight."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from tileweave.codegen.compiled import CompiledKernel
from tileweave.codegen.compiled import compile as compile_kernel
from tileweave.compiler.config import Config
from tileweave.compiler.trace import kernel
from tileweave.errors import ArgumentError, ConfigError
from tileweave.primitives import language as tw
from tileweave.primitives.expr import Expr
from tileweave.primitives.group import current_group, solo_group
from tileweave.primitives.memory import Tensor


@kernel
def router_logits(
    x: Tensor, weight: Tensor, logits: Tensor, *, rows: int = 64, columns: int = 64, depth: int = 8192
) -> None:
    """`logits` `[num_tokens, num_experts]` = x `[num_tokens, hidden]` · weightᵀ.

    On fixed tiles, so that a row's bits do not depend on how many rows share the product.
    """
    num_tokens, hidden = x.shape
    num_experts = weight.shape[0]

    @tw.task(grid={"m": tw.ceildiv(num_tokens, rows), "n": tw.ceildiv(num_experts, columns)})
    def product(m: Expr, n: Expr) -> None:
        row, column = tw.ds(m * rows, rows, stop=num_tokens), tw.ds(n * columns, columns, stop=num_experts)
        total = tw.zeros((rows, columns))
        for k in tw.range(0, hidden, depth):
            inner = tw.ds(k, depth, stop=hidden)
            tw.dot(tw.load(x, (row, inner)), tw.load(weight, (column, inner)).T, total)
        tw.store(logits, (row, column), total)


@lru_cache(maxsize=64)
def compile_logits(hidden: int, num_experts: int, dtype: torch.dtype) -> CompiledKernel:
    """The kernel of routers of this size: not kept by them, so that they copy and pickle as their weights do."""
    return compile_kernel(
        router_logits,
        Tensor(("num_tokens", hidden), dtype),
        Tensor((num_experts, hidden), dtype),
        Tensor(("num_tokens", num_experts), torch.float32),
        config=Config(),
    )


class Router(nn.Module):
    """Softmax over all experts in fp32, then the `num_topk` largest; optionally made to sum to one.

    The same forward as the routers of Mixtral (`renormalize=True`) and Qwen3-MoE (`norm_topk_prob`).

    Args:
        hidden: width of a token.
        num_experts: experts over all ranks.
        num_topk: slots a token.
        renormalize: divide the chosen weights by their sum.
        dtype: of `weight` `[num_experts, hidden]`; torch.float32 or torch.bfloat16.

    Raises:
        ConfigError: `num_topk` is more than `num_experts`.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        renormalize: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if not 1 <= num_topk <= num_experts:
            raise ConfigError(f"num_topk is {num_topk}; a softmax router needs 1 to num_experts={num_experts}")
        self.num_topk = num_topk
        self.renormalize = renormalize
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=dtype))
        nn.init.normal_(self.weight, std=hidden**-0.5)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 `[num_tokens, num_experts]`; needs no peer.

        Raises:
            ArgumentError: `x` has another shape, dtype or layout.
        """
        if x.dim() != 2:
            raise ArgumentError(f"router input needs shape [num_tokens, hidden], got {list(x.shape)}")
        num_experts, hidden = self.weight.shape
        out = torch.empty(x.shape[0], num_experts, dtype=torch.float32)
        compile_logits(hidden, num_experts, self.weight.dtype).run(
            (x, self.weight.detach(), out), solo_group(current_group())
        )
        return out

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(topk_idx int64, topk_weights float32)`, both `[num_tokens, num_topk]`, for x `[num_tokens, hidden]`."""
        scores = torch.softmax(self.logits(x), dim=-1)
        weights, index = torch.topk(scores, self.num_topk, dim=-1)
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return index, weights
