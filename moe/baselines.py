"""What Tileweave's layer is compared with: the truth in fp64, and good layers of plain torch, for ranks or one GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tileweave.errors import ArgumentError
from tileweave.moe.config import local_experts
from tileweave.moe.routing_device import count_experts

if TYPE_CHECKING:
    from tileweave.moe.config import Activation, ExpertWeights, MoEConfig

# Measured on AVX2 cores: at these row counts W @ x.T beats x @ W.T in fp32, by a tenth to a third; at others not.
_TRANSPOSED_ROWS = frozenset((4, 8, 16))
# From this many rows up, converting bf16 weights to fp32 and multiplying those beats the bf16 product.
_CONVERT_ROWS = 8


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`activation` of `x`, elementwise, in the dtype of `x`."""
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "relu":
        return F.relu(x)
    return x


def _act(projected: torch.Tensor, config: MoEConfig, dim: int) -> torch.Tensor:
    """act(gate) * up with gate and up stacked along `dim`; act(projected) for experts without a gate."""
    if not config.gated:
        return activate(projected, config.activation)
    gate, up = projected.chunk(2, dim)
    return activate(gate, config.activation).mul_(up)  # `projected` is the caller's temporary


@torch.inference_mode()
def reference_moe(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    config: MoEConfig,
) -> torch.Tensor:
    """The layer in eager float64 on one rank: the truth that errors are measured against.

    Args:
        x: [num_tokens, hidden], any floating dtype.
        topk_idx: int64 [num_tokens, num_topk]; -1 = unused slot. A repeated expert counts each time.
        topk_weights: [num_tokens, num_topk], any floating dtype; those of unused slots are ignored.
        weights: of all experts.
        config: of the layer.

    Returns:
        float64 [num_tokens, hidden].
    """
    rows = x.double()
    scale = topk_weights.double()

    def mlp(tokens: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return _act(tokens @ first.double().t(), config, 1) @ second.double().t()

    out = torch.zeros_like(rows)
    for expert in range(weights.num_local_experts):
        tokens, slots = torch.nonzero(topk_idx == expert, as_tuple=True)
        if not len(tokens):
            continue
        projected = rows[tokens] @ weights.gate_up[expert].double().t()
        if weights.gate_up_bias is not None:
            projected += weights.gate_up_bias[expert].double()
        result = _act(projected, config, 1) @ weights.down[expert].double().t()
        if weights.down_bias is not None:
            result += weights.down_bias[expert].double()
        out.index_add_(0, tokens, result * scale[tokens, slots].unsqueeze(1))
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        out += mlp(rows, weights.shared_gate_up, weights.shared_down)
    return out


class GlooMoE:
    """The layer as a competent user writes it with torch.distributed on CPU ranks.

    Sort by expert, all-to-all of counts, all-to-all of rows, one fused gate/up product and one down
    product per expert, all-to-all back, weighted sum. The shared expert runs while rows travel.
    Choices that measurement made: `all_to_all_single` (as fast as point-to-point, 4 times faster than
    the list form), `embedding_bag` for the weighted sum (7 times faster than a gather and a sum),
    buffers kept between calls (fresh ones cost page faults), `W @ x.T` for some small row counts.

    Forward only. With one rank no process group is needed.
    """

    def __init__(self, config: MoEConfig, weights: ExpertWeights, group: dist.ProcessGroup | None = None) -> None:
        """`weights` are those of `local_experts(config.num_experts, world_size, rank)`.

        Raises:
            ArgumentError: `weights` do not fit `config` and this rank.
        """
        self.config = config
        self.weights = weights
        self.group = group
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._experts_of = [len(local_experts(config.num_experts, self.world_size, r)) for r in range(self.world_size)]
        self._num_local = self._experts_of[self.rank]
        weights.check(config, self._num_local)
        self._buffers: dict[str, torch.Tensor] = {}

    @torch.inference_mode()
    def __call__(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Run the layer; every rank of the group calls it together.

        Args:
            x: [num_tokens, hidden] in the config's dtype; num_tokens may differ by rank and be 0.
            topk_idx: int64 [num_tokens, num_topk], -1 = unused slot.
            topk_weights: float32 [num_tokens, num_topk].

        Returns:
            [num_tokens, hidden] in the config's dtype.

        Raises:
            ArgumentError: shape or dtype of `x` or shape of `topk_idx` does not fit the config.
        """
        config = self.config
        if x.dim() != 2 or x.shape[1] != config.hidden or x.dtype != config.dtype:
            raise ArgumentError(
                f"x is {x.dtype} {list(x.shape)}; expected {config.dtype} [num_tokens, {config.hidden}]"
            )
        if topk_idx.shape != (x.shape[0], config.num_topk):
            raise ArgumentError(f"topk_idx has shape {list(topk_idx.shape)}; expected {[x.shape[0], config.num_topk]}")
        # Unused slots sort first and are cut off.
        flat = topk_idx.reshape(-1)
        counts = torch.bincount(flat + 1, minlength=config.num_experts + 1)
        num_unused = int(counts[0])
        counts = counts[1:]
        order = torch.argsort(flat, stable=True)[num_unused:]
        send = torch.index_select(x, 0, order // config.num_topk, out=self._buffer("send", len(order)))

        if self.world_size == 1:
            shared = self._shared(x)
            back = self._buffer("back", len(order))
            self._experts(send, counts.tolist(), back)
        else:
            shared, back = self._exchange(x, send, counts)

        out = self._combine(back, order, topk_weights, num_unused)
        return out if shared is None else out.add_(shared)

    def _exchange(
        self, x: torch.Tensor, send: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Rows to their experts and back; (shared expert's output, results in the order of `send`)."""
        num_local, world_size = self._num_local, self.world_size
        from_ranks = torch.empty(world_size * num_local, dtype=torch.int64)
        dist.all_to_all_single(from_ranks, counts, [num_local] * world_size, self._experts_of, self.group)
        from_ranks = from_ranks.view(world_size, num_local)
        send_split = [int(part.sum()) for part in torch.split(counts, self._experts_of)]
        receive_split: list[int] = from_ranks.sum(1).tolist()
        num_rows = sum(receive_split)
        received = self._buffer("received", num_rows)
        work: Any = dist.all_to_all_single(received, send, receive_split, send_split, self.group, async_op=True)
        # Rows arrive by source, then expert; the products want them by expert.
        expert_of_row = torch.arange(num_local).repeat(world_size).repeat_interleave(from_ranks.reshape(-1))
        by_expert = torch.argsort(expert_of_row, stable=True)
        by_source = torch.empty_like(by_expert)
        by_source[by_expert] = torch.arange(num_rows)
        shared = self._shared(x)
        work.wait()
        rows = torch.index_select(received, 0, by_expert, out=self._buffer("rows", num_rows))
        results = self._buffer("results", num_rows)
        self._experts(rows, from_ranks.sum(0).tolist(), results)
        # `received` has been read: it carries the answers.
        answers = torch.index_select(results, 0, by_source, out=received)
        back = self._buffer("back", len(send))
        dist.all_to_all_single(back, answers, send_split, receive_split, self.group)
        return shared, back

    def _combine(
        self, back: torch.Tensor, order: torch.Tensor, topk_weights: torch.Tensor, num_unused: int
    ) -> torch.Tensor:
        """Weighted sum over the slots of each token: [num_tokens, hidden] in the config's dtype."""
        num_tokens, num_topk = topk_weights.shape
        if not len(order):
            return torch.zeros(num_tokens, self.config.hidden, dtype=self.config.dtype)
        position = torch.zeros(num_tokens * num_topk, dtype=torch.int64)
        position[order] = torch.arange(len(order))
        scale = topk_weights.to(self.config.dtype)
        if num_unused:
            used = torch.zeros(num_tokens * num_topk, dtype=torch.bool)
            used[order] = True
            scale = scale.masked_fill(~used.view(num_tokens, num_topk), 0)
        return F.embedding_bag(position.view(num_tokens, num_topk), back, mode="sum", per_sample_weights=scale)

    def _shared(self, x: torch.Tensor) -> torch.Tensor | None:
        first, second = self.weights.shared_gate_up, self.weights.shared_down
        if first is None or second is None:
            return None
        out = torch.empty_like(x)
        self._mlp(x, first, None, second, None, out)
        return out

    def _experts(self, rows: torch.Tensor, counts: list[int], out: torch.Tensor) -> None:
        """Each local expert on its run of `rows` [num_rows, hidden], into the same rows of `out`."""
        weights = self.weights
        start = 0
        for expert, count in enumerate(counts):
            if count:
                self._mlp(
                    rows[start : start + count],
                    weights.gate_up[expert],
                    None if weights.gate_up_bias is None else weights.gate_up_bias[expert],
                    weights.down[expert],
                    None if weights.down_bias is None else weights.down_bias[expert],
                    out[start : start + count],
                )
            start += count

    def _mlp(
        self,
        x: torch.Tensor,
        first: torch.Tensor,
        first_bias: torch.Tensor | None,
        second: torch.Tensor,
        second_bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """One expert on x [rows, hidden] into `out`, by the faster of the ways that its row count allows."""
        if x.dtype == torch.bfloat16 and x.shape[0] >= _CONVERT_ROWS:
            x, first, second = x.float(), first.float(), second.float()
            first_bias = None if first_bias is None else first_bias.float()
            second_bias = None if second_bias is None else second_bias.float()
        if out.dtype == torch.float32 and x.shape[0] in _TRANSPOSED_ROWS:
            projected = torch.mm(first, x.t())
            if first_bias is not None:
                projected += first_bias.unsqueeze(1)
            result = torch.mm(second, _act(projected, self.config, 0))
            if second_bias is not None:
                result += second_bias.unsqueeze(1)
            out.copy_(result.t())
            return
        inner = _act(F.linear(x, first, first_bias), self.config, 1)
        if inner.dtype != out.dtype:
            out.copy_(F.linear(inner, second, second_bias))
        elif second_bias is None:
            torch.mm(inner, second.t(), out=out)
        else:
            torch.addmm(second_bias, inner, second.t(), out=out)

    def _buffer(self, name: str, num_rows: int) -> torch.Tensor:
        """Uninitialised [num_rows, hidden], cut from memory that is kept and grows as needed."""
        kept = self._buffers.get(name)
        if kept is None or kept.shape[0] < num_rows:
            kept = self._buffers[name] = torch.empty(num_rows, self.config.hidden, dtype=self.config.dtype)
        return kept[:num_rows]


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of `x` up to `ends[e]` times the transpose of `weight[e]`; torch's grouped product where there is one."""
    found = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is not None and x.dtype == torch.bfloat16 and x.is_cuda:
        product: torch.Tensor = found(x, weight.transpose(-2, -1), offs=ends)
        return product
    out = x.new_empty((len(x), weight.shape[1]))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], weight[expert].t(), out=out[start:end])
        start = end
    return out


def grouped_moe(
    config: MoEConfig, weights: ExpertWeights, x: torch.Tensor, index: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """The layer as a user of torch writes it on one GPU: sort, two grouped products, weighted sum.

    x `[num_tokens, hidden]`; index, scale `[num_tokens, num_topk]`, without unused slots. Gated experts, all of them
    in `weights`; nothing is read back to the host where torch has a grouped product.
    """
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    expert = flat[order]
    ends = count_experts(index, config.num_experts).cumsum(0).int()
    projected = grouped_product(x[order // config.num_topk], weights.gate_up, ends)
    if weights.gate_up_bias is not None:
        projected += weights.gate_up_bias[expert]
    gate, up = projected.chunk(2, 1)
    result = grouped_product(activate(gate, config.activation).mul_(up), weights.down, ends)
    if weights.down_bias is not None:
        result += weights.down_bias[expert]
    back = torch.empty_like(result).index_copy_(0, order, result).view(*index.shape, config.hidden)
    return (back * scale.to(config.dtype).unsqueeze(-1)).sum(1)
