"""Megatron distributed checkpoints of a job, written in the background, loaded into any layout.

The checkpoint rung of the ladder. It saves and loads with Megatron's own `dist_checkpointing` in its fully reshardable
format and shares no mapping with the live path, so tests use it as the oracle. To write, the main thread takes a
snapshot at a boundary, a thread with its own group writes files, and one rename publishes the complete checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from torch.distributed.checkpoint.api import CheckpointException

from liver_core.handoff.generations import first_of, replacing
from liver_core.state.checkpoint_damage import damage_of, is_torn
from liver_core.state.checkpoint_files import (
    ARGUMENTS,
    COMMON_FILE,
    FILES_FILE,
    NEEDED_FILES,
    SMALL_STATE_FILE,
    STEP,
    Author,
    CheckpointError,
    DamagedCheckpoint,
    LeaseStanding,
    author_of,
    digested,
    missing_file,
    noted_sizes,
    starts_in,
    sync_to_disk,
    verify,
    wrong_size,
)
from liver_core.state.error_texts import error_text, not_in_time, told_by_system
from liver_core.state.kept_settings import (
    keeping_settings,
    overruled_rates,
    schedule_refusal,
    with_rates_that_count,
)
from liver_core.state.live_state import LiveState
from liver_core.state.megatron_arguments import megatron_arguments
from liver_core.state.megatron_checkpoint import OF_ANY_PRECISION, model_refusal, read_megatron_checkpoint
from liver_core.state.megatron_optimizer import attach_moments, readopt_moments, unwrapped
from liver_core.state.optimizer_chain import optimizer_chain, probe_scalars
from liver_core.state.optimizer_checkpoint import ANY_LAYOUT, load_optimizers, sharded_optimizers
from liver_core.state.optimizer_step import gather_weights
from liver_core.training.job import TrainingJob, TrainState
from liver_core.worlds.agreed_work import CannotDo, NotDone, do_together, leave
from liver_core.worlds.groups import default_group
from liver_core.worlds.megatron import MegatronWorld

_log = logging.getLogger(__name__)
PARTIAL = ".partial-"
REPLACED = f".replaced{PARTIAL}"
"""In the name of a checkpoint whose step was written again, for a moment."""
LEASE_AGAIN_S = 0.2
LEASE_WAIT_S = 600.0
"""As long as a world that nobody hears stands still before a step."""


def _write_in_this_thread(transforms: Any, *rest: Any) -> None:
    """Write the files of this rank one after the other, and put their write results into the last argument, a queue.

    Megatron forks a process for each file. A fork of a process with threads may hang in a lock that another thread
    held. It also keeps the connections of a rank that died open, so that its peers wait for it, and outlives it.
    """
    *_, buckets, results = rest
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        one, counted = queue.SimpleQueue[tuple[int, Any]](), queue.Queue[int]()
        counted.put(number)
        _Writer.write_preloaded_data(
            transforms,
            local_proc_idx=number,
            write_bucket=bucket,
            results_queue=one,  # type: ignore[arg-type]
            count_queue=counted,  # type: ignore[arg-type]
            use_fsync=True,
        )
        _, written[number] = one.get()
        if isinstance(written[number], Exception):
            results.put(told_by_system(written[number]))
            return
    results.put(written)


_Writer = filesystem_async.FileSystemWriterAsync
_Writer.write_preloaded_data_multiproc = staticmethod(_write_in_this_thread)  # type: ignore[method-assign]

_kept = threading.local()


@contextmanager
def _keeping_failures() -> Iterator[list[Exception]]:
    """Within this block, in this thread: what Megatron has one rank do alone fails without an error. The errors."""
    before, _kept.errors = getattr(_kept, "errors", None), []
    try:
        yield _kept.errors
    finally:
        _kept.errors = before


def _of_one_rank(work: Callable[..., Any]) -> Callable[..., Any]:
    """Work of files that Megatron has rank 0 do while the others wait for it in a collective, for ever if it raises."""

    @wraps(work)
    def kept(*args: Any, **kwargs: Any) -> Any:
        try:
            return work(*args, **kwargs)
        except Exception as error:
            if getattr(_kept, "errors", None) is None:
                raise
            _kept.errors.append(error)
            return None

    return kept


TorchCommonSaveStrategy.save_common = _of_one_rank(TorchCommonSaveStrategy.save_common)  # type: ignore[method-assign]
_Writer.finish = _of_one_rank(_Writer.finish)  # type: ignore[method-assign]
serialization.save_config = _of_one_rank(serialization.save_config)


def _metadata(world: MegatronWorld) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": ANY_LAYOUT,
        # Gathers through host memory, onto one data-parallel rank. Else each bucket is gathered on every device.
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "dp_cp_group": world.collection.dp_cp,
    }


def snapshot(world: MegatronWorld, state: TrainState) -> dict[str, Any]:
    """The sharded state dict at this boundary, copied to host memory, so training can go on during the write.

    A collective of the world: it gathers weights and optimizer state over data-parallel ranks. Main thread only.
    """
    gather_weights(state)
    module = unwrapped(state.model)
    model = module.sharded_state_dict(metadata=_metadata(world))
    parts = sharded_optimizers(optimizer_chain(state.optimizer), model, _metadata(world))
    copied: Any = dict_list_map_inplace(_copied, {"model": model})
    # As Megatron's chain describes itself. It has gathered the state of optimizers into tensors of its own.
    return copied | {"optimizer": parts if len(parts) > 1 else next(iter(parts.values()))}


def _copied(value: Any) -> Any:
    if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data is not None:
        return replace(value, data=value.data.detach().to("cpu", copy=True))
    return value


def write(
    sharded: dict[str, Any],
    small: Mapping[str, Any],
    path: str,
    group: dist.ProcessGroup,
    *,
    job_id: str = "",
    generation: int = 0,
    standing: Callable[[], LeaseStanding] = lambda: LeaseStanding(has_lease=True, ends=False),
) -> None:
    """Write a snapshot to `path`, all ranks of `group` together. `path` is complete or absent, never partial.

    Until it is complete it has the `generation` in its name. It is published only while a rank of this world holds a
    step lease by its `standing`: else the service may have started the job elsewhere, and what it has started may write
    the same step or start from it. Nor is it published once a newer start of the job has announced itself there.

    Safe in a background thread: `group` is this thread's default group during the call. Raises CheckpointError on all
    ranks, and publishes nothing, if a value on any of them is not finite, if any of them cannot write or read again
    what it wrote, if all of them are to end and hold no lease, if they get none for LEASE_WAIT_S, or if there is a
    newer start. Any other error is of this rank alone: then it leaves `group`, so that none waits for it.
    """
    target, partial = Path(path), Path(f"{path}{PARTIAL}{generation}")
    # Megatron's own queue spawns a manager process per rank, which imports everything again: 6 s and 236 MB.
    filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]
    rank = group.rank()
    try:
        with default_group(group):
            do_together(lambda: _check_finite(sharded), group)
            do_together(lambda: _make_room(partial, generation) if rank == 0 else None, group)
            do_together(lambda: _check_writable(partial, rank), group)
            do_together(lambda: _save(sharded, partial), group, errors=CannotDo)
            files = do_together(lambda: digested(partial, rank), group)
            do_together(lambda: verify(partial, files), group)
            found: list[Any] = [None] * group.size()
            dist.all_gather_object(found, files, group=group)
            _await_lease(path, group, standing)
            every, author = {name: entry for each in found for name, entry in each.items()}, Author(job_id, generation)
            do_together(lambda: _publish(partial, target, small, every, author) if rank == 0 else None, group)
        return
    except NotDone as error:
        failed: BaseException = CheckpointError(f"checkpoint {path}: not written, {error}")
    except CheckpointError as error:
        failed = error
    except BaseException as error:
        leave(group)
        failed = not_in_time(path, error) or error
    if rank == 0:
        # A disk that is full has room again.
        shutil.rmtree(partial, ignore_errors=True)
    raise failed


def _make_room(folder: Path, generation: int) -> None:
    """An empty folder, and the space of what worlds of earlier starts left incomplete: they publish nothing more."""
    _remove_partials(folder.parent, first_of(generation) - 1)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _check_writable(folder: Path, rank: int) -> None:
    """Torch would make the folder where it is missing: on a node that does not share it, for this rank alone."""
    mine = folder / f".rank-{rank}"
    mine.touch()
    mine.unlink()


def _save(sharded: dict[str, Any], partial: Path) -> None:
    """A collective. Raises CannotDo on all ranks, the text on the first, if torch could not write on one of
    them, and on the first where it could not write what is written once."""
    with _keeping_failures() as failures:
        try:
            dist_checkpointing.save(sharded, str(partial))
        except CheckpointException as error:
            if not failures:
                raise CannotDo(error_text(error), names_ranks=True) from error
    if failures:
        raise CannotDo(error_text(failures[0])) from failures[0]


def _publish(partial: Path, target: Path, small: Mapping[str, Any], files: Mapping[str, Any], author: Author) -> None:
    (partial / SMALL_STATE_FILE).write_text(json.dumps(small))
    listed = {**files, **digested(partial, 0, only=(SMALL_STATE_FILE,))}
    (partial / FILES_FILE).write_text(json.dumps(listed))
    sync_to_disk(partial / FILES_FILE)
    sync_to_disk(partial)
    if damage := damage_of(partial):
        raise CannotDo(f"{damage}, though it was written so: a start could not load it")
    # A disk may have stood still since this world had its lease.
    if replacing(starts_in(target.parent, author.job_id), author.generation):
        raise CannotDo("a newer start of the job writes there")
    before = Path(f"{target}{REPLACED}{partial.name.rpartition(PARTIAL)[2]}")
    with contextlib.suppress(FileNotFoundError):
        os.replace(target, before)
    try:
        os.replace(partial, target)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.replace(before, target)
        raise
    sync_to_disk(target.parent)
    shutil.rmtree(before, ignore_errors=True)


def _await_lease(path: str, group: dist.ProcessGroup, standing: Callable[[], LeaseStanding]) -> None:
    """A collective of `group`: its ranks go on together or not at all."""
    until = time.monotonic() + LEASE_WAIT_S
    while True:
        mine = standing()
        goes_on = not mine.ends and time.monotonic() < until
        shown = torch.tensor([int(mine.has_lease), int(goes_on)], dtype=torch.int64)
        dist.all_reduce(shown, op=dist.ReduceOp.MAX, group=group)
        is_leased, is_awaited = shown.tolist()
        if is_leased:
            return
        if not is_awaited:
            raise CheckpointError(
                f"checkpoint {path}: not published, no rank here has a step lease, another world of the job may step"
            )
        time.sleep(LEASE_AGAIN_S)


def _check_finite(sharded: dict[str, Any]) -> None:
    def look(value: Any) -> None:
        tensor = value.data if isinstance(value, ShardedTensor | ShardedTensorFactory) else value
        if torch.is_tensor(tensor) and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CannotDo(f"{getattr(value, 'key', 'a value')} is not finite")

    dict_list_map_outplace(look, sharded)


def read_small_state(path: str) -> dict[str, Any]:
    """The small state of a complete checkpoint. Raises CheckpointError if there is none."""
    folder = Path(path)
    for name in NEEDED_FILES:
        if not (folder / name).is_file():
            raise CheckpointError(f"checkpoint {path}: {name} is missing, so it is not a complete checkpoint")
    return json.loads((folder / SMALL_STATE_FILE).read_text())


def check_ours(path: str, job: TrainingJob, state: TrainState, world: MegatronWorld) -> str:
    """Raise CheckpointError if this checkpoint of ours is of another model than that of the job that was just built,
    though its tensors may fit, or of another schedule where that must be the same. Returns which of the job's rates do
    not count; empty if all do. The precision may be another one: masters and moments are the same in each."""
    small = read_small_state(path)
    if refusal := model_refusal(_arguments_of(path), megatron_arguments(job, state, world), OF_ANY_PRECISION):
        raise CheckpointError(f"checkpoint {path}: {refusal}")
    if refusal := schedule_refusal(small["scheduler"], state.scheduler):
        raise CheckpointError(f"checkpoint {path}: {refusal}")
    return overruled_rates(small, state)


def _arguments_of(path: str) -> dict[str, Any]:
    """Those that a checkpoint of ours was written with; empty where an older version wrote none, and where the file
    cannot be read: whoever loads the checkpoint says more of that."""
    try:
        return torch.load(Path(path) / COMMON_FILE, map_location="cpu", weights_only=True).get(ARGUMENTS) or {}
    except Exception:  # Torch raises many kinds where a file is torn.
        return {}


def load_checkpoint(
    path: str, job: TrainingJob, world: MegatronWorld, state: TrainState, live: LiveState
) -> dict[str, Any]:
    """Load masters, moments and weights of `path` into a world of any layout that it can be cut to. Returns the small
    state. `path`: a checkpoint of ours, or one of Megatron's training. Raises CheckpointError, and DamagedCheckpoint
    where no world could load it.

    A collective of `world`. Call it under `building(world)` or when `world` is active.
    """
    theirs = read_megatron_checkpoint(path)
    if theirs:
        theirs.check(job, state, world)
        theirs.check_layout(world.layout)
    elif (overruled := check_ours(path, job, state, world)) and world.everyone.rank() == 0:
        _log.warning("checkpoint %s: %s", path, overruled)
    module = unwrapped(state.model)
    if not live.optimizer.has_stepped:
        # Megatron cannot describe an optimizer that never stepped.
        attach_moments(live, probe_scalars(live.optimizer))
    metadata = theirs.metadata(world) if theirs else _metadata(world)
    model = module.sharded_state_dict(metadata=metadata)
    wanted = {
        "model": model,
        # Another chain may have written it: each part asks for its own parameters, whose keys do not depend on that.
        "parts": sharded_optimizers(live.optimizer, model, metadata, is_loading=True),
    }
    try:
        loaded: Any = dist_checkpointing.load(wanted, path)
    except (Exception, CheckpointException) as error:
        # Megatron passes on errors of its strategies and of torch. Add which checkpoint it was.
        if is_torn(error):
            raise DamagedCheckpoint(path, error_text(error).partition(". ")[0]) from error  # The rest is advice.
        raise CheckpointError(f"checkpoint {path}: {error_text(error)}{theirs.advice if theirs else ''}") from error
    module.load_state_dict(loaded["model"])
    with theirs.loading_optimizer(state) if theirs else keeping_settings(state):
        sharding = metadata["distrib_optim_sharding_type"]
        load_optimizers(live.optimizer, loaded["parts"], loaded.get("optimizer", {}), sharding)
    readopt_moments(live)
    small = theirs.small_state(job, state, live) if theirs else read_small_state(path)
    return with_rates_that_count(small, state)


def prune(written: Path, keep: int, *, job_id: str = "", generation: int = 0) -> list[str]:
    """Remove the job's oldest checkpoints beyond the newest `keep` that are whole, up to the one just `written`, and
    what `generation` and older ones left incomplete. Leave what other jobs wrote, and later steps: a world that was
    replaced has written them, and this one will write them again. Returns what could not be removed, and why."""
    folder, left = written.parent, []
    ours = (entry for entry in sorted(folder.glob(f"{STEP}*")) if PARTIAL not in entry.name and not entry.is_symlink())
    complete = [entry for entry in ours if (entry / SMALL_STATE_FILE).is_file() and _is_of(entry, job_id)]
    until = [entry for entry in complete if entry.name <= written.name]
    kept = [entry for entry in until if entry == written or _is_whole(entry)][-keep:]
    for old in [entry for entry in until if entry.name < kept[0].name] if kept else []:
        # Whoever dies in the middle of it leaves nothing that looks complete, and the next removal finds the rest.
        _tried(lambda old=old: os.replace(old, f"{old}{PARTIAL}{generation}"), old, left)
    return left + _remove_partials(folder, generation)


def _is_of(folder: Path, job_id: str) -> bool:
    """Whether this job wrote the checkpoint. Of one whose author is not known that is taken for granted."""
    author = author_of(folder)
    return author is None or not job_id or author.job_id == job_id


def _is_whole(folder: Path) -> bool:
    """As far as names and sizes of its files show."""
    try:
        return not missing_file(folder) and not wrong_size(folder, noted_sizes(folder) or [])
    except (OSError, ValueError):
        return False


def _remove_partials(folder: Path, generation: int) -> list[str]:
    left: list[str] = []
    for partial in sorted(folder.glob(f"{STEP}*{PARTIAL}*")):
        number = partial.name.rpartition(PARTIAL)[2]
        if number.isdecimal() and int(number) <= generation:
            _tried(lambda partial=partial: shutil.rmtree(partial), partial, left)
    return left


def _tried(remove: Callable[[], None], path: Path, left: list[str]) -> None:
    try:
        remove()
    except FileNotFoundError:
        return
    except OSError as error:
        left.append(f"{path} ({error.strerror or error})")
