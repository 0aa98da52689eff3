"""MoE layers under expert parallelism, written in the DSL.

The stages below each declare tasks and hand on the memory that they fill; a kernel is a
sequence of stages.  `moe_layer` runs the whole layer as one kernel, `dispatch_gemm` and
`gemm_combine` its two halves.  Shapes: `[rows, …]` are this rank's received rows, by
expert and in global token order inside an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from tileweave.compiler.trace import kernel
from tileweave.errors import ConfigError
from tileweave.moe.activations import ACTIVATIONS
from tileweave.moe.routing import Plan
from tileweave.primitives import language as tw
from tileweave.primitives.expr import Expr, ScalarLike
from tileweave.primitives.memory import Memory, Signal, Symmetric, Table, Tensor
from tileweave.primitives.tile import Tile


@dataclass(frozen=True)
class WeightSpecs:
    """Specs of this rank's experts, named as the fields of `ExpertWeights`; None where there is no such tensor."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None


@dataclass(frozen=True)
class LayerShape:
    """What the kernels specialise on, besides the shapes of their arguments.

    num_local_experts: most experts that a rank owns. capacity: rows that a rank can receive.
    max_tokens: tokens that a rank can bring. activation: a name of `moe.activations`.
    """

    num_local_experts: int
    capacity: int
    max_tokens: int
    activation: str
    gated: bool


@dataclass(frozen=True)
class Tiles:
    """Tile sizes: rows and columns of the GEMMs, depth of their K loop, tokens a combine tile, copy width."""

    rows: int = 128
    columns: int = 256
    depth: int = 8192
    tokens: int = 32
    copy: int = 8192


Returns: TypeAlias = Literal["pull", "push"]
"""How results come back: `pull`, the tokens' ranks read them where the experts are; `push`, the experts' ranks send
them, which also works where a rank cannot address a peer's memory, as between nodes."""


@dataclass(frozen=True)
class Ready:
    """Memory and the counters that tell when its parts are written."""

    memory: Memory
    counters: Signal


@kernel
def moe_layer(
    x: Tensor,
    topk_weights: Tensor,
    weights: WeightSpecs,
    plan: Plan[Table],
    out: Tensor,
    shape: LayerShape,
    *,
    tiles: Tiles = Tiles(),
    returns: Returns = "pull",
) -> None:
    """Dispatch, grouped GEMM with activation, grouped GEMM, combine: a whole MoE layer in one kernel.

    x `[num_tokens, hidden]`, topk_weights float32 `[num_tokens, num_topk]`, out `[num_tokens, hidden]`.
    """
    received = dispatch(x, plan, shape, tiles)
    hidden = grouped_gemm_activation(received, weights, plan, shape, tiles)
    results = grouped_gemm(hidden, weights, plan, shape, tiles, returns)
    shared = shared_expert(x, weights, shape, tiles)
    combine(results, shared, topk_weights, plan, out, tiles, returns)


@kernel
def dispatch_gemm(
    x: Tensor,
    weights: WeightSpecs,
    plan: Plan[Table],
    out: Tensor,
    shape: LayerShape,
    *,
    tiles: Tiles = Tiles(),
) -> None:
    """The first half: rows to their experts, and `out` `[num_rows, intermediate]` = their activations."""
    received = dispatch(x, plan, shape, tiles)
    grouped_gemm_activation(received, weights, plan, shape, tiles, out=out)


@kernel
def gemm_combine(
    activations: Tensor,
    topk_weights: Tensor,
    weights: WeightSpecs,
    plan: Plan[Table],
    out: Tensor,
    shape: LayerShape,
    *,
    tiles: Tiles = Tiles(),
    returns: Returns = "pull",
) -> None:
    """The second half: `activations` `[num_rows, intermediate]` to the weighted sum `out` `[num_tokens, hidden]`."""
    results = grouped_gemm(activations, weights, plan, shape, tiles, returns)
    combine(results, None, topk_weights, plan, out, tiles, returns)


def dispatch(x: Tensor, plan: Plan[Table], shape: LayerShape, tiles: Tiles) -> Ready:
    """Push each token's row to the ranks of its experts.

    One task handles the rows that this rank has for one row tile of one expert, and adds
    their number to the tile's counter, so that a partial tile is counted exactly.
    """
    _, hidden = x.shape
    received = tw.symmetric("received", (shape.capacity, int(hidden)), x.dtype)
    counters = tw.signals("received_rows", (shape.num_local_experts, row_tiles(shape.capacity, tiles)))

    def num_tiles(expert: Expr, peer: Expr) -> Expr:
        first, count = plan.send_row[peer, expert], plan.send_count[peer, expert]
        return tw.minimum(tw.ceildiv(first + count, tiles.rows) - first // tiles.rows, count)

    @tw.task(grid={"expert": shape.num_local_experts, "peer": tw.world_size(), "m": num_tiles}, role="comm")
    def dispatch(expert: Expr, peer: Expr, m: Expr) -> None:
        first, count = plan.send_row[peer, expert], plan.send_count[peer, expert]
        tile = first // tiles.rows + m
        begin = tw.maximum(tile * tiles.rows, first)
        end = tw.minimum((tile + 1) * tiles.rows, first + count)
        source = plan.send_start[peer, expert] - first
        target = plan.expert_start[peer, expert]
        tokens = plan.send_token.rows(tw.ds(source + begin, tiles.rows, stop=source + end))
        rows = tw.ds(target + begin, tiles.rows, stop=target + end)
        for column in tw.range(0, hidden, tiles.copy):
            columns = tw.ds(column, tiles.copy, stop=hidden)
            tw.remote_store(received, (rows, columns), tw.gather(x, (tokens, columns)), peer)
        tw.signal(counters, (expert, tile), end - begin, peer)

    return Ready(received, counters)


def grouped_gemm_activation(
    received: Ready,
    weights: WeightSpecs,
    plan: Plan[Table],
    shape: LayerShape,
    tiles: Tiles,
    out: Tensor | None = None,
) -> Ready:
    """`activation(rows · gateᵀ) * (rows · upᵀ)` for each expert's rows, or `activation(rows · upᵀ)` when not gated."""
    width = activated_width(weights.gate_up, shape)
    memory = tw.workspace("activations", (shape.capacity, width), weights.gate_up.dtype) if out is None else out
    counters = tw.signals("activation_tiles", (shape.num_local_experts, row_tiles(shape.capacity, tiles)))

    @tw.task(grid=expert_grid(plan, shape, tiles, width))
    def gate_up(expert: Expr, m: Expr, n: Expr) -> None:
        rows = expert_rows(plan, expert, m, tiles)
        start, stop = plan.expert_offsets[expert] + m * tiles.rows, plan.expert_offsets[expert + 1]
        tw.wait(received.counters, (expert, m), tw.minimum(stop - start, tiles.rows))
        value = activated(received.memory, rows, (weights.gate_up, weights.gate_up_bias), (expert,), n, shape, tiles)
        tw.store(memory, (rows, tw.ds(n * tiles.columns, tiles.columns, stop=width)), value)
        if out is None:
            tw.signal(counters, (expert, m))

    return Ready(memory, counters)


def grouped_gemm(
    activations: Ready | Tensor,
    weights: WeightSpecs,
    plan: Plan[Table],
    shape: LayerShape,
    tiles: Tiles,
    returns: Returns = "pull",
) -> Ready:
    """`activations · downᵀ` for each expert's rows, brought to where `combine` expects them.

    With `pull` they stay at the expert's rank, and each tile tells every source rank how many of its rows it has
    finished in this column tile. With `push` a task of its own sends them.
    """
    if returns not in get_args(Returns):
        raise ConfigError(f"returns={returns!r}: expected one of {', '.join(get_args(Returns))}")
    hidden = int(weights.down.shape[1])
    source = activations.memory if isinstance(activations, Ready) else activations
    results = tw.symmetric("results", (shape.capacity, hidden), weights.down.dtype)
    columns_done = -(-hidden // tiles.columns)
    if returns == "pull":
        counters = tw.signals("result_rows", (columns_done,))
    else:
        counters = tw.signals("result_tiles", (shape.num_local_experts, row_tiles(shape.capacity, tiles)))

    @tw.task(grid=expert_grid(plan, shape, tiles, hidden))
    def down(expert: Expr, m: Expr, n: Expr) -> None:
        rows = expert_rows(plan, expert, m, tiles)
        if isinstance(activations, Ready):
            width = int(source.shape[1])
            tw.wait(activations.counters, (expert, m), tw.ceildiv(width, tiles.columns))
        columns = tw.ds(n * tiles.columns, tiles.columns, stop=hidden)
        (value,) = linear(source, rows, weights.down, [(expert, columns)], tiles)
        tw.store(results, (rows, columns), add_bias(value, weights.down_bias, (expert, columns)))
        if returns == "push":
            tw.signal(counters, (expert, m))
            return
        for peer in tw.range(tw.world_size()):
            begin = tw.maximum(plan.source_start[expert, peer], m * tiles.rows)
            end = tw.minimum(plan.source_start[expert, peer + 1], (m + 1) * tiles.rows)
            with tw.when(begin < end):
                tw.signal(counters, n, end - begin, peer)

    done = Ready(results, counters)
    return done if returns == "pull" else send_results(done, columns_done, plan, shape, tiles)


def send_results(results: Ready, columns_done: int, plan: Plan[Table], shape: LayerShape, tiles: Tiles) -> Ready:
    """Push finished rows back to the ranks of their tokens, in the order in which those ranks sent them.

    One task handles the rows of one row tile of one expert that came from one rank: a contiguous block at both ends.
    """
    _, hidden = results.memory.shape
    num_topk = int(plan.slot_place.shape[1])
    returned = tw.symmetric("returned", (shape.max_tokens * num_topk, int(hidden)), results.memory.dtype)
    counters = tw.signals("returned_rows", (1,))

    def num_tiles(expert: Expr, peer: Expr) -> Expr:
        first, stop = plan.source_start[expert, peer], plan.source_start[expert, peer + 1]
        return tw.minimum(tw.ceildiv(stop, tiles.rows) - first // tiles.rows, stop - first)

    @tw.task(grid={"expert": shape.num_local_experts, "peer": tw.world_size(), "m": num_tiles}, role="comm")
    def send_results(expert: Expr, peer: Expr, m: Expr) -> None:
        first, stop = plan.source_start[expert, peer], plan.source_start[expert, peer + 1]
        tile = first // tiles.rows + m
        begin, end = tw.maximum(tile * tiles.rows, first), tw.minimum((tile + 1) * tiles.rows, stop)
        source, target = plan.expert_offsets[expert], plan.return_start[expert, peer] - first
        tw.wait(results.counters, (expert, tile), columns_done)
        columns = tw.ds(0, int(hidden))
        tw.put(
            returned, (tw.ds(target + begin, tiles.rows, stop=target + end), columns),
            results.memory, (tw.ds(source + begin, tiles.rows, stop=source + end), columns), peer,
        )  # fmt: skip
        tw.signal(counters, 0, end - begin, peer)

    return Ready(returned, counters)


def shared_expert(x: Tensor, weights: WeightSpecs, shape: LayerShape, tiles: Tiles) -> Ready | None:
    """The dense expert that every token passes, on this rank's own tokens; needs no communication."""
    if weights.shared_gate_up is None or weights.shared_down is None:
        return None
    num_tokens, hidden = x.shape
    gate_up, down = weights.shared_gate_up, weights.shared_down
    width = activated_width(gate_up, shape)
    middle = tw.workspace("shared_activations", (shape.max_tokens, width), x.dtype)
    middle_done = tw.signals("shared_activation_tiles", (row_tiles(shape.max_tokens, tiles),))
    memory = tw.workspace("shared_results", (shape.max_tokens, int(hidden)), x.dtype)
    counters = tw.signals("shared_rows", (tw.ceildiv(hidden, tiles.columns),))

    def grid(columns: ScalarLike) -> dict[str, ScalarLike]:
        return {"m": tw.ceildiv(num_tokens, tiles.rows), "n": tw.ceildiv(columns, tiles.columns)}

    @tw.task(grid=grid(width))
    def shared_gate_up(m: Expr, n: Expr) -> None:
        rows = tw.ds(m * tiles.rows, tiles.rows, stop=num_tokens)
        value = activated(x, rows, (gate_up, None), (), n, shape, tiles)
        tw.store(middle, (rows, tw.ds(n * tiles.columns, tiles.columns, stop=width)), value)
        tw.signal(middle_done, m)

    @tw.task(grid=grid(hidden))
    def shared_down(m: Expr, n: Expr) -> None:
        rows = tw.ds(m * tiles.rows, tiles.rows, stop=num_tokens)
        columns = tw.ds(n * tiles.columns, tiles.columns, stop=hidden)
        tw.wait(middle_done, m, tw.ceildiv(width, tiles.columns))
        (value,) = linear(middle, rows, down, [(columns,)], tiles)
        tw.store(memory, (rows, columns), value)
        tw.signal(counters, n, tw.minimum(num_tokens - m * tiles.rows, tiles.rows))

    return Ready(memory, counters)


def combine(
    results: Ready,
    shared: Ready | None,
    topk_weights: Tensor,
    plan: Plan[Table],
    out: Tensor,
    tiles: Tiles,
    returns: Returns = "pull",
) -> None:
    """`out[t]` = Σ over slots, in slot order and fp32, of weight · result row, plus the shared expert's row."""
    num_tokens, hidden = out.shape
    num_topk = int(topk_weights.shape[1])
    assert isinstance(results.memory, Symmetric)

    @tw.task(grid={"n": tw.ceildiv(hidden, tiles.columns), "t": tw.ceildiv(num_tokens, tiles.tokens)}, role="reduce")
    def combine(n: Expr, t: Expr) -> None:
        tokens = tw.ds(t * tiles.tokens, tiles.tokens, stop=num_tokens)
        columns = tw.ds(n * tiles.columns, tiles.columns, stop=hidden)
        tw.wait(results.counters, n if returns == "pull" else 0, plan.num_slots[0])
        total = tw.zeros((tiles.tokens, tiles.columns))
        for slot in tw.range(num_topk):
            weight = tw.load(topk_weights, (tokens, slot))
            if returns == "pull":
                rows, peers = plan.slot_row.rows(tokens, slot), plan.slot_rank.rows(tokens, slot)
                part = tw.gather(results.memory, (rows, columns), peers)
            else:
                part = tw.gather(results.memory, (plan.slot_place.rows(tokens, slot), columns))
            total += part * weight[:, None]
        if shared is not None:
            tw.wait(shared.counters, n, num_tokens)
            total += tw.load(shared.memory, (tokens, columns))
        tw.store(out, (tokens, columns), total)


def row_tiles(rows: int, tiles: Tiles) -> int:
    """Row tiles that can begin in `rows` rows."""
    return -(-rows // tiles.rows)


def expert_grid(plan: Plan[Table], shape: LayerShape, tiles: Tiles, columns: int) -> dict[str, tw.Extent]:
    """Row tiles of each expert, by the rows it has received, times column tiles."""

    def num_tiles(expert: Expr) -> Expr:
        return tw.ceildiv(plan.expert_offsets[expert + 1] - plan.expert_offsets[expert], tiles.rows)

    return {"expert": shape.num_local_experts, "m": num_tiles, "n": tw.ceildiv(columns, tiles.columns)}


def expert_rows(plan: Plan[Table], expert: Expr, m: Expr, tiles: Tiles) -> tw.Slice:
    """Row tile `m` of an expert; its last one may be partial."""
    return tw.ds(plan.expert_offsets[expert] + m * tiles.rows, tiles.rows, stop=plan.expert_offsets[expert + 1])


def activated_width(gate_up: Memory, shape: LayerShape) -> int:
    """Columns of `activation(rows · gateᵀ) * (rows · upᵀ)`, for `gate_up` `[…, columns, hidden]` with gate above up."""
    columns = int(gate_up.shape[-2])
    return columns // 2 if shape.gated else columns


def activated(
    x: Memory,
    rows: tw.Slice,
    gate_up: tuple[Memory, Memory | None],
    expert: tuple[ScalarLike, ...],
    n: Expr,
    shape: LayerShape,
    tiles: Tiles,
) -> Tile:
    """Column tile `n` of `activation(rows · gateᵀ) * (rows · upᵀ)`, or of `activation(rows · upᵀ)` when not gated.

    `gate_up` is a weight and its bias, whose indices begin with `expert`.
    """
    weight, bias = gate_up
    width = activated_width(weight, shape)
    columns = [(*expert, tw.ds(part + n * tiles.columns, tiles.columns, stop=part + width))
               for part in ((0, width) if shape.gated else (0,))]  # fmt: skip
    parts = linear(x, rows, weight, columns, tiles)
    parts = [add_bias(part, bias, at) for part, at in zip(parts, columns, strict=True)]
    value = ACTIVATIONS[shape.activation](parts[0])
    return value * parts[1] if shape.gated else value


def linear(
    x: Memory, rows: tw.Slice, weight: Memory, columns: Sequence[tuple[ScalarLike | tw.Slice, ...]], tiles: Tiles
) -> list[Tile]:
    """`x[rows] · weight[columns]ᵀ` for each entry of `columns`, sharing the loads of `x`."""
    depth = x.shape[1]
    totals = [tw.zeros((tiles.rows, tiles.columns)) for _ in columns]
    for k in tw.range(0, depth, tiles.depth):
        inner = tw.ds(k, tiles.depth, stop=depth)
        left = tw.load(x, (rows, inner))
        for total, at in zip(totals, columns, strict=True):
            tw.dot(left, tw.load(weight, (*at, inner)).T, total)
    return totals


def add_bias(value: Tile, bias: Memory | None, at: tuple[ScalarLike | tw.Slice, ...]) -> Tile:
    """`value` `[rows, columns]` plus `bias[at]` `[columns]`, if there is one."""
    return value if bias is None else value + tw.load(bias, at)[None, :]
