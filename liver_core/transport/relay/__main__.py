"""The relay as a process: `python -m liver_core.transport.relay`. Its configuration is one line of JSON on standard
input, since it holds a key; the answer is one line on standard output. Ends by itself, on SIGTERM, and on SIGUSR1 once
no rank is connected."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import sys
from collections.abc import Callable

from liver_core import cuda_driver
from liver_core.transport.relay.messages import handoff_key
from liver_core.transport.relay.relay import LONELY_S, UNUSED_S, Relay, RelayConfig


def main(load_cuda: Callable[[], cuda_driver.CudaDriver] = cuda_driver.load) -> int:
    """Serve until told to end. 2: it cannot listen, and standard output says why."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s relay: %(message)s")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    given = json.loads(sys.stdin.readline())
    low, high = given["ports"]
    config = RelayConfig(
        local=given["local"],
        host=given["host"],
        ports=(low, high),
        keys=tuple(handoff_key(key, given["handoff_id"]) for key in given["peer_keys"]),
        uids=tuple(given["uids"]),
        stream_bytes_per_s=None if (gbps := given.get("stream_gbps_max")) is None else gbps * 1e9 / 8,
        unused_s=float(given.get("unused_s", UNUSED_S)),
        lonely_s=float(given.get("lonely_s", LONELY_S)),
        listen_s=float(given.get("listen_s", 0.0)),
    )
    try:
        relay = Relay(config, load_cuda)
    except OSError as error:
        sys.stdout.write(
            json.dumps({"error": f"{config.host}, ports {low} to {high}: {error.strerror or error}"}) + "\n"
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: relay.end())
    signal.signal(signal.SIGUSR1, lambda *_: relay.expect_nobody())
    with contextlib.suppress(BrokenPipeError):  # The agent may have ended since.
        sys.stdout.write(json.dumps({"host": config.host, "port": relay.port}) + "\n")
        sys.stdout.flush()
    relay.serve()
    counts = relay.counts
    logging.info(
        "served %d reads, %.3f GB; %d met another version, %d were refused; %d strangers",
        *(counts.reads, counts.bytes / 1e9, counts.moved, counts.refused, counts.strangers),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
