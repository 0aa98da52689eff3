"""What the companion kernel of an emitted module stands on: sends to other nodes through NVSHMEM.

The functions are those of NVSHMEM's device bitcode, linked when Triton compiles the
module.  An address is that of this rank's own symmetric segment; NVSHMEM finds the same
place on the peer, whose number is its rank.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import core

from tileweave.codegen.triton.device import address, fence, pointer, wait

_ADD = tl.constexpr(10)  # NVSHMEM_SIGNAL_ADD
_I32, _I64 = tl.int32, tl.int64
_DONE = tl.int32  # what they return is nothing, which Triton cannot say


@core.extern
def _putmem_block(target, source, num_bytes, peer, _semantic=None):
    known = {(_I64, _I64, _I64, _I32): ("nvshmemx_putmem_block", _DONE)}
    return core.extern_elementwise("", "", [target, source, num_bytes, peer], known, is_pure=False, _semantic=_semantic)


@core.extern
def _putmem_nbi_block(target, source, num_bytes, peer, _semantic=None):
    known = {(_I64, _I64, _I64, _I32): ("nvshmemx_putmem_nbi_block", _DONE)}
    return core.extern_elementwise("", "", [target, source, num_bytes, peer], known, is_pure=False, _semantic=_semantic)


@core.extern
def _putmem_signal_nbi_block(target, source, num_bytes, counter, amount, operation, peer, _semantic=None):
    known = {(_I64, _I64, _I64, _I64, _I64, _I32, _I32): ("nvshmemx_putmem_signal_nbi_block", _DONE)}
    given = [target, source, num_bytes, counter, amount, operation, peer]
    return core.extern_elementwise("", "", given, known, is_pure=False, _semantic=_semantic)


@core.extern
def _signal_op(counter, amount, operation, peer, _semantic=None):
    known = {(_I64, _I64, _I32, _I32): ("nvshmemx_signal_op", _DONE)}
    return core.extern_elementwise(
        "", "", [counter, amount, operation, peer], known, is_pure=False, _semantic=_semantic
    )


@core.extern
def _quiet(_semantic=None):
    return core.extern_elementwise("", "", [], {(): ("nvshmem_quiet", _DONE)}, is_pure=False, _semantic=_semantic)


@triton.jit
def _is_first_thread():
    return tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1) == 0


@triton.jit
def put(target, source, num_bytes, peer):
    """Begin to copy bytes of this rank's segment to a peer's; what the worker wrote there before is copied."""
    fence("acq_rel", "sys")
    _putmem_nbi_block(target, source, tl.cast(num_bytes, tl.int64), tl.cast(peer, tl.int32))


@triton.jit
def put_now(target, source, num_bytes, peer):
    """As `put`, but on return the source may be written again."""
    fence("acq_rel", "sys")
    _putmem_block(target, source, tl.cast(num_bytes, tl.int64), tl.cast(peer, tl.int32))
    tl.debug_barrier()


@triton.jit
def put_signal(target, source, num_bytes, peer, counter, amount):
    """As `put`, and add to a counter of the peer after its data have arrived there."""
    fence("acq_rel", "sys")
    place, add = counter.to(tl.int64), tl.cast(_ADD, tl.int32)
    _putmem_signal_nbi_block(
        target, source, tl.cast(num_bytes, tl.int64), place, tl.cast(amount, tl.int64), add, tl.cast(peer, tl.int32)
    )


@triton.jit
def signal_peer(counter, amount, peer):
    """Add to a counter of a peer after all that this worker has put anywhere has arrived."""
    quiet()
    if _is_first_thread():
        _signal_op(counter.to(tl.int64), tl.cast(amount, tl.int64), tl.cast(_ADD, tl.int32), tl.cast(peer, tl.int32))
    tl.debug_barrier()


@triton.jit
def quiet():
    """Wait until all that this worker has put has arrived."""
    tl.debug_barrier()
    if _is_first_thread():
        _quiet()
    tl.debug_barrier()


@triton.jit
def enter_off_node(heap, rank, place, world: tl.constexpr, near: tl.constexpr, entered_at: tl.constexpr, launch):
    """The companion's part of `enter`: tell the ranks of other nodes, and wait until all have entered."""
    state, _worker, _position, _limit = launch
    epoch = tl.load(state)
    own = pointer(address(heap, rank), tl.int64) + entered_at
    if place == 0:
        for further in tl.range(near, world):
            signal_peer(own, 1, (rank // near * near + further) % world)
    wait(own, epoch * world, launch, -1, 0, "acquire", "sys")
    return epoch
