"""A process of its own that tries NIXL over EFA and says why it does not work: libfabric aborts the process where
FI_EFA_USE_DEVICE_RDMA asks for what the device cannot do. Imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liver_core.transport.nixl_library import load_nixl, loaded_libraries

OK = "ok"
BACKEND = "LIBFABRIC"
INSTALLER = "AWS's EFA installer 1.51.0 or newer (libfabric 2.7)"
_FI_VERSION = 1 << 16 | 18
"""Of libfabric's interface, as NIXL asks for it."""
_REMEDIES = {
    "libfabric": f"install {INSTALLER}, and let the loader find /opt/amazon/efa/lib (ldconfig, LD_LIBRARY_PATH)",
    "libcudart": "install the CUDA runtime that NIXL's wheel was built for",
    "libcuda": "install NVIDIA's driver, or start the container with it",
    "libhwloc": "install hwloc (Debian: libhwloc15)",
}


def plugin_of(libraries: Sequence[str]) -> Path | None:
    """NIXL's plugin for libfabric: where NIXL looks for it, beside its own library or in NIXL_PLUGIN_DIR."""
    beside = (Path(path).parent / "plugins" for path in libraries if re.match(r"libnixl[-.]", Path(path).name))
    folders = [Path(os.environ["NIXL_PLUGIN_DIR"])] if "NIXL_PLUGIN_DIR" in os.environ else list(beside)
    return next((found for folder in folders if (found := folder / f"libplugin_{BACKEND}.so").exists()), None)


def why_not_loaded(plugin: Path) -> str:
    """Empty if it loads."""
    try:
        ctypes.CDLL(str(plugin), mode=os.RTLD_LAZY | os.RTLD_LOCAL)
    except OSError as error:
        library = Path(str(error).partition(":")[0]).name
        remedy = next((text for name, text in _REMEDIES.items() if library.startswith(name)), "")
        return f"NIXL's plugin for libfabric does not load: {error}{remedy and f'; {remedy}'}"
    return ""


def why_no_provider(libfabric: Any) -> str:
    """Empty if libfabric finds a device for its provider efa, which FI_PROVIDER names."""
    found = ctypes.c_void_p()
    status = libfabric.fi_getinfo(
        ctypes.c_uint32(_FI_VERSION), None, None, ctypes.c_uint64(0), None, ctypes.byref(found)
    )
    if status == 0:
        return ""
    libfabric.fi_strerror.restype = ctypes.c_char_p
    reason = (libfabric.fi_strerror(-status) or b"").decode()
    return (
        f"libfabric finds no device for its provider efa ({reason}): install {INSTALLER}; a container needs the devices"
        " /dev/infiniband/uverbs* too"
    )


def why_no_agent(api: Any) -> str:
    """Empty if NIXL makes an agent. Where the device cannot read, the process ends here."""
    try:
        agent = api.nixl_agent("check", api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND]))
    except Exception as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        lock = "" if limit == resource.RLIM_INFINITY else f"; only {limit} bytes may be locked: set ulimit -l unlimited"
        return f"NIXL cannot use EFA: {error!r}{lock}"
    return "" if BACKEND in agent.backends else "NIXL has no backend for libfabric: install nixl 1.5.1 or newer"


def main(libraries: Sequence[str]) -> str:
    """`libraries`: paths of those that the process we look for has loaded, and that the plugin needs too."""
    for path in libraries:
        ctypes.CDLL(path, mode=os.RTLD_LAZY | os.RTLD_GLOBAL)
    api = load_nixl({})
    plugin = plugin_of(loaded_libraries())
    if plugin is None:
        return f"this NIXL has no libplugin_{BACKEND}.so: install the wheel nixl 1.5.1 or newer"
    return why_not_loaded(plugin) or why_no_provider(ctypes.CDLL("libfabric.so.1")) or why_no_agent(api) or OK


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]))
    sys.stdout.flush()
