"""Who waits for what: the text of a launch that ended before its work was done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tileweave.codegen.lower import Lowered
from tileweave.compiler.printer import place
from tileweave.primitives.control import SITE_ENTER, SITE_GATHER, AbortInfo, AbortKind, WorkerRecord


def describe_abort(
    launched: Mapping[int, Lowered], info: AbortInfo, records: Sequence[WorkerRecord], timeout_s: float
) -> str:
    """First the cause, then one line for each worker that is not idle.

    `launched` holds the kernels of this rank's last launches by epoch: other ranks may be in
    the launch before.
    """
    stuck = next((r.epoch for r in records if (r.rank, r.worker) == (info.rank, info.worker)), -1)
    kernel = launched.get(stuck, launched[max(launched)])
    lines = [f"kernel '{kernel.program.name}' stopped: {_cause(info, timeout_s)}"]
    waiting = [r for r in records if r.state == "waiting"]
    running = [r for r in records if r.state == "running"]
    lines += [f"  {describe_record(launched.get(record.epoch), record)}" for record in (*waiting, *running)]
    return "\n".join(lines)


def _cause(info: AbortInfo, timeout_s: float) -> str:
    if info.kind is AbortKind.TIMEOUT:
        return f"rank {info.rank} waited longer than {timeout_s:g} s (TILEWEAVE_TIMEOUT_S)"
    if info.kind is AbortKind.RANK_DIED:
        return f"rank {info.rank} died{f': {info.text}' if info.text else ''}"
    return f"rank {info.rank} failed: {info.text}" if info.rank is not None else info.text


def describe_record(lowered: Lowered | None, record: WorkerRecord) -> str:
    """One worker in a launch of `lowered`.

    As in `rank 1 worker 0: down[expert=3, m=0] at k.py:8 waits for ready[3]: expected 8, observed 4`.
    """
    who = f"rank {record.rank} " + ("host" if record.worker is None else f"worker {record.worker}")
    if record.site in (SITE_ENTER, SITE_GATHER):
        what = "enter the launch" if record.site == SITE_ENTER else "join a collective call"
        return f"{who}: waits for rank {record.signal_index} to {what}"
    if lowered is None or not 0 <= record.task < len(lowered.tasks):
        return f"{who}: {record.state}"
    task = lowered.program.tasks[record.task]
    grid = ", ".join(f"{d}={i}" for d, i in zip(task.dims, record.tile, strict=False))
    if record.state != "waiting" or not 0 <= record.site < len(lowered.sites):
        return f"{who}: {task.name}[{grid}] {record.state}"
    site = lowered.sites[record.site]
    counters = site.op.signal
    index = np.unravel_index(record.signal_index, counters.static_shape)
    at = ", ".join(str(int(i)) for i in index)
    return (
        f"{who}: {task.name}[{grid}] at {place(site.op.location)} waits for {counters.name}[{at}]: "
        f"expected {record.expected}, observed {record.observed}"
    )
