"""Waiting for a condition with a deadline, and job files: for ranks that train nothing, and for ranks that train."""

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agent.protocol.jobfile import JobFile

POLL_S = 0.02


def quick_directory() -> Path:
    """A new directory in memory where there is one: a journal on a busy disk waits for everybody else's writes."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="liver-", dir=memory if os.access(memory, os.W_OK) else None))


async def eventually(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> Any:
    """The condition's first true value; fails naming `what`. The condition may be a coroutine function."""
    limit = time.monotonic() + timeout_s
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert time.monotonic() < limit, f"{what} did not happen in {timeout_s:g} s"
        await asyncio.sleep(POLL_S)


def fake_job(shared: Path, *, steps: int = 1_000_000, nodes: int = 4, faults: dict[str, str] | None = None) -> JobFile:
    """A job whose ranks are fake."""
    return JobFile.model_validate(
        {
            "name": "fake",
            "args": {"shared": str(shared), "faults": faults or {}},
            "global_batch": 12,
            "nodes": {"min": 1, "max": nodes},
            "model": {
                "num_layers": 12,
                "hidden_size": 192,
                "num_attention_heads": 6,
                "padded_vocab_size": 384,
                "seq_length": 128,
            },
            "checkpoint": {"path": str(shared / "checkpoints")},
            "stop": {"steps": steps},
        }
    )


def real_job(name: str, entrypoint: str, args: dict[str, Any], **more: Any) -> JobFile:
    """A small GPT that is never done, trained by a class of `held_job`."""
    return JobFile.model_validate(
        {
            "name": name,
            "entrypoint": f"tests.agent.held_job:{entrypoint}",
            "args": args,
            "nodes": {"min": 1, "max": 4},
            "model": {
                "num_layers": 6,
                "hidden_size": 64,
                "ffn_hidden_size": 128,
                "num_attention_heads": 4,
                "padded_vocab_size": 264,
                "seq_length": 32,
            },
            "stop": {"steps": 1_000_000},
            **more,
        }
    )
