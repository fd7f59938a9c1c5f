"""Which GPUs this node offers, asked once when the agent starts."""

import logging
import subprocess
from collections.abc import Mapping

from liver_core.gpu_environment import VISIBLE, listed_gpus, visible_gpus

ANSWER_S = 30.0
CPU = "cpu"
_log = logging.getLogger(__name__)


def gpus_of_node(device: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """In slot order. None where the agent was started for the CPU; none, and a warning, where none is found."""
    if device == CPU:
        return ()
    found = visible_gpus(environ, listed_gpus(_listing()))
    if not found:
        _log.warning("--device is %s, but no GPU is found (nvidia-smi -L, CUDA_VISIBLE_DEVICES)", device)
    return found


def hidden_gpus(device: str) -> dict[str, str]:
    """What is in the environment of every process that trains here. Torch uses a GPU wherever it sees one, so an agent
    for the CPU hides those that the machine has."""
    return {VISIBLE: ""} if device == CPU else {}


def _listing() -> str:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("nvidia-smi -L: %s", error)
        return ""
    return done.stdout
