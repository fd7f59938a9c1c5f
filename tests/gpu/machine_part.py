"""Part 1: what is on this machine, and what a job of the product would miss here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.gpu.check import Finding, Verdict

NEEDED = ("torch", "numpy", "megatron.core", "nixl", "pydantic", "psutil", "einops", "yaml", "pytest")
WATCHED = ("torch", "numpy", "megatron-core", "nixl", "nixl-cu12", "nixl-cu13", "transformer-engine", "apex", "triton")
SETTINGS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_DEBUG", "UCX_TLS", "UCX_NET_DEVICES")
COMMANDS = {
    "gpus": ("nvidia-smi", "-L"),
    "query": (
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,memory.used,compute_mode,mig.mode.current",
        "--format=csv,noheader",
    ),
    "links": ("nvidia-smi", "nvlink", "-s"),
    "topology": ("nvidia-smi", "topo", "-m"),
}


def run(device: str) -> Finding:
    found: dict[str, Any] = {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        "versions": {name: version for name in WATCHED if (version := version_of(name))},
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "ptrace_scope": text_of(Path("/proc/sys/kernel/yama/ptrace_scope")),
        "peer_memory": Path("/sys/module/nvidia_peermem").is_dir(),
        "rdma": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "mps": shutil.which("nvidia-cuda-mps-control") or "",
    }
    missing = [name for name in NEEDED if not present(name)]
    if missing:
        return Finding(Verdict.FAILED, f"not installed: {', '.join(missing)}", found, ends_the_run=True)
    found |= {name: said for name, command in COMMANDS.items() if device == "cuda" and (said := output_of(command))}
    return judge(device, found)


def judge(device: str, found: dict[str, Any]) -> Finding:
    """What torch sees, and whether settings stand in the way."""
    import torch

    from liver_core.gpu_environment import GpuRefused, check_environment

    found["cuda_of_torch"] = torch.version.cuda or ""
    if device == "cpu":
        text = f"torch {torch.__version__} on {found['cores']} cores"
        return Finding(Verdict.PASSED, text, found)
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        text = f"torch {torch.__version__}, {built}, finds no GPU here"
        return Finding(Verdict.FAILED, text, found, ends_the_run=True)
    try:
        check_environment(os.environ)
    except GpuRefused as refusal:
        return Finding(Verdict.FAILED, str(refusal), found, ends_the_run=True)
    devices = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
    found["devices"] = [{"name": each.name, "bytes": each.total_memory} for each in devices]
    free, total = torch.cuda.mem_get_info(0)
    found["free_bytes"] = free
    names = ", ".join(sorted({each.name for each in devices}))
    text = f"{len(devices)} x {names}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free, torch {torch.__version__}"
    return Finding(Verdict.PASSED, text, found)


def present(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def output_of(command: tuple[str, ...]) -> str:
    """What it prints; empty where it is not installed, fails or takes long."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()[:4000]
    except (OSError, subprocess.SubprocessError):
        return ""
