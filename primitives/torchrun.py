"""Joining the ranks of a torchrun job on one host. Imports torch only when a job is joined."""

from __future__ import annotations

import atexit
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from tileweave.errors import GroupError
from tileweave.primitives.control import Control
from tileweave.primitives.group import Group, active_group, set_current_group

_START_S = 120.0  # how long ranks may take to come up
_joins = 0


def init() -> Group:
    """Join the group of a `torchrun` job, all ranks on one host, and make it current.

    Uses the job's key-value store to find the peers, so it works before, after and
    without `torch.distributed.init_process_group`. Called again it returns the same group.
    In a rank of `spawn` or `VirtualGroup` it returns that rank's group.

    Raises:
        GroupError: not under torchrun, ranks on several hosts or in several containers,
            torch missing; on all ranks alike where they can reach each other.
        HangError, RankDiedError: a rank did not join.
    """
    global _joins
    group = active_group()
    if group is not None and group.kind != "single":
        return group
    rank, world_size = _read_environment()
    _joins += 1
    control = Control.create(1)[0] if world_size == 1 else _meet(rank, world_size)
    joined = Group(rank, control, "processes")
    atexit.register(joined.close)  # says that it left, so that peers do not wait for it
    joined.barrier()
    set_current_group(joined)
    return joined


def _read_environment() -> tuple[int, int]:
    """Rank and world size as torchrun gives them."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise GroupError(
            f"init() joins a torchrun job, but {', '.join(missing)} is not set; run `torchrun --nproc-per-node=2 "
            "script.py`, or start ranks with tw.spawn or tw.VirtualGroup"
        )
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError as error:
        raise GroupError(f"RANK, WORLD_SIZE and LOCAL_WORLD_SIZE must be integers: {error}") from None
    if local != world_size:
        raise GroupError(
            f"this job has {world_size} ranks, {local} of them on this host; the shm heap joins ranks of one host only"
        )
    return rank, world_size


def _meet(rank: int, world_size: int) -> Control:
    """Rank 0 makes the control block and offers it in the job's store; the others open it."""
    store = _store(rank, world_size)
    # Keys of this call alone: a job that was restarted, or that closed its group, may join anew.
    prefix = f"tileweave/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_joins}"
    control: Control | None = None
    descriptor, error = -1, ""
    if rank == 0:
        try:
            control, descriptor = Control.create(world_size, shared=True)
        except Exception as problem:  # noqa: BLE001  (whatever it is, the peers must hear of it)
            error = str(problem)
        store.set(f"{prefix}/offer", json.dumps([os.getpid(), descriptor, _host(), error]))
    else:
        pid, opened, host, error = json.loads(store.get(f"{prefix}/offer"))
        try:
            if host != _host():
                error = "it runs on another host or in another container than rank 0"
            elif not error:
                control = Control.attach(pid, opened, world_size)
        except Exception as problem:  # noqa: BLE001  (as above)
            error = str(problem)
    try:
        store.set(f"{prefix}/joined/{rank}", error)
        answers = {each: store.get(f"{prefix}/joined/{each}").decode() for each in range(world_size)}
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # all have opened it by now, or will not
    errors = [f"rank {each}: {text}" for each, text in answers.items() if text]
    if errors:
        raise GroupError(f"the ranks of this job cannot form a group: {'; '.join(errors)}")
    assert control is not None
    return control


def _store(rank: int, world_size: int) -> Any:
    """The job's key-value store."""
    try:
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous
    except ImportError as error:
        raise GroupError(
            f"init() needs torch to find the peers of a torchrun job: {error}; pip install torch"
        ) from None
    if not dist.is_available():
        raise GroupError("this build of torch has no torch.distributed; install one that has it, or use tw.spawn")
    try:
        return next(iter(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=_START_S))))[0]
    except Exception as error:
        raise GroupError(
            f"cannot reach the job's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {error}"
        ) from error


def _host() -> str:
    """What two processes share exactly when they can open each other's files under /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
