"""What every emitted Triton module stands on: launch state, signals, waits, entry and small scalar functions.

`state` is a row of the record in `codegen/state.py` for each rank. A wait that gives up leaves its
words there once, and every worker stops at its next tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tileweave.codegen import state as record

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_EPOCH, _FAILED = tl.constexpr(record.EPOCH), tl.constexpr(record.FAILED)
_WORKER, _ENTRY = tl.constexpr(record.WORKER), tl.constexpr(record.ENTRY)
_SITE, _INDEX = tl.constexpr(record.SITE), tl.constexpr(record.INDEX)
_EXPECTED, _OBSERVED = tl.constexpr(record.EXPECTED), tl.constexpr(record.OBSERVED)


@triton.jit
def address(table, index):
    """An address from a table of them."""
    return tl.load(table + index)


@triton.jit
def pointer(place, dtype: tl.constexpr):
    """An address, all of which are multiples of 16 bytes, as a pointer to elements of `dtype`.

    Offsets are added to the pointer, not to the address: the compiler forgets what a sum of
    integers is a multiple of, and accesses would be 2 bytes wide.
    """
    return tl.multiple_of(place.to(tl.pointer_type(dtype)), 16)


@triton.jit
def floordiv(a, b):
    """Division that rounds down, for `b` above 0."""
    return tl.where(a >= 0, a // b, -((b - 1 - a) // b))


@triton.jit
def floormod(a, b):
    """Remainder in [0, b), for `b` above 0."""
    return a - floordiv(a, b) * b


@triton.jit
def tanh(x):
    """Hyperbolic tangent; near 0, where the quotient would cancel, its series."""
    y = tl.minimum(tl.abs(x), 20.0)
    t = tl.exp(-2.0 * y)
    s = x * x
    series = x * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835)))))
    quotient = (1.0 - t) / (1.0 + t)
    return tl.where(y < 0.3, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def dot(a, b, total):
    """`total` plus `a` times `b` in fp32."""
    if INTERPRETED:  # the interpreter multiplies the bit patterns of bfloat16
        return tl.dot(from_e4m3(a), from_e4m3(b), total, input_precision="ieee")
    if a.dtype == tl.float8e4nv:  # sm_90 keeps fewer bits than fp32 while it sums e4m3, so it is to sum 128 at most
        return tl.dot(a, b, total, max_num_imprecise_acc=min(a.shape[1], 128))
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def round_to_bf16(x):
    """fp32 rounded to the nearest bfloat16, ties to even."""
    if INTERPRETED:  # the interpreter cuts off
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        is_number = x == x  # noqa: PLR0124  (false of NaN)
        x = tl.where(is_number, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def from_e4m3(x):
    """A tile of e4m3, or of any other type, in fp32."""
    if INTERPRETED:  # noqa: SIM102  (that it interprets is known before types are)
        if x.dtype == tl.float8e4nv:  # whose NaNs the interpreter reads as numbers
            code = x.to(tl.uint8, bitcast=True).to(tl.int32)
            size = code & 127
            subnormal = size.to(tl.float32) * 0.001953125  # 2⁻⁹
            normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
            number = tl.where(size < 8, subnormal, normal).to(tl.int32, bitcast=True)
            bits = tl.where(size == 127, 0x7FC00000, number) | ((code & 128) << 24)
            return bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def round_to_e4m3(x):
    """fp32 rounded to the nearest e4m3, ties to even; what is beyond ±448 to ±448, NaN to NaN."""
    if INTERPRETED:  # the interpreter does not saturate
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        kept = tl.minimum(size, 0x43E00000)
        normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - 960
        above = kept.to(tl.float32, bitcast=True) + 16384.0  # floats from 2¹⁴ on lie as far apart as subnormals
        subnormal = above.to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(kept < 0x3C800000, subnormal, normal)
        code = tl.where(size > 0x7F800000, 127, code) | ((bits >> 24) & 128)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def failed(state):
    """Whether some wait of this rank has given up."""
    return tl.load(state + _FAILED, volatile=True)


@triton.jit
def signal(counter, amount, order: tl.constexpr, scope: tl.constexpr):
    """Add to a counter, after everything that all threads of this worker did before."""
    tl.debug_barrier()  # Triton 3.6 puts none before a release
    tl.atomic_add(counter, tl.cast(amount, tl.int64), sem=order, scope=scope)


@triton.jit
def wait(counter, target, launch, site, index, order: tl.constexpr, scope: tl.constexpr):
    """Spin until a counter reaches `target`, or the limit is reached; then record who waited for what."""
    state, worker, position, limit = launch
    wanted = tl.cast(target, tl.int64)
    seen = tl.atomic_add(counter, tl.cast(0, tl.int64), sem=order, scope=scope)
    spins = tl.cast(0, tl.int64)
    while (seen < wanted) & (spins < limit):
        seen = tl.atomic_add(counter, tl.cast(0, tl.int64), sem=order, scope=scope)
        spins += 1
    if seen < wanted:
        first = tl.atomic_cas(state + _FAILED, tl.cast(0, tl.int64), tl.cast(1, tl.int64))
        if first == 0:
            tl.store(state + _WORKER, tl.cast(worker, tl.int64))
            tl.store(state + _ENTRY, tl.cast(position, tl.int64))
            tl.store(state + _SITE, tl.cast(site, tl.int64))
            tl.store(state + _INDEX, tl.cast(index, tl.int64))
            tl.store(state + _EXPECTED, wanted)
            tl.store(state + _OBSERVED, seen)


@triton.jit
def fence(order: tl.constexpr, scope: tl.constexpr):
    """Order this worker's accesses before and after it."""
    tl.debug_barrier()
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence." + order + "." + scope + "; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def proxy_fence():
    """Order plain accesses of global memory with those of the tensor memory accelerator."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def enter(heap, rank, world: tl.constexpr, near: tl.constexpr, entered_at: tl.constexpr, launch):
    """Tell the `near` ranks of this node that this one has entered its launch, and wait until all `world` have.

    So no rank writes into buffers that a slower one still reads in the launch before.
    """
    state, worker, _position, _limit = launch
    epoch = tl.load(state + _EPOCH)
    if world > 1:
        if worker == 0:
            first = rank // near * near
            for peer in range(near):
                signal(pointer(address(heap, first + peer), tl.int64) + entered_at, 1, "release", "sys")
        own = pointer(address(heap, rank), tl.int64) + entered_at
        wait(own, epoch * world, launch, -1, 0, "acquire", "sys")
    return epoch


@triton.jit
def clear(words, count: tl.constexpr):
    """Zero `count` counters."""
    for start in tl.range(0, count, 256):
        at = start + tl.arange(0, 256)
        tl.store(words + at, tl.zeros((256,), tl.int64), mask=at < count)
