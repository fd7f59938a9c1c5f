"""Sends a storm into a queue on time, from a process of its own: `python -m tests.benchmarks.storm_sender PLAN`.

PLAN is a file with one JSON object: endpoint, queue, count, machines, seconds, seed. On standard output comes, at the
end, one JSON object: for each event when it was first sent, by the monotonic clock, which all processes of a machine
share.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from boto3.session import Session

from tests.benchmarks.storm_messages import Message, body_of, storm
from tests.service.clouds.moto_server import REGION

BATCH = 10
SENDERS = 2


class Sender:
    """Sends batches when the last message of each is due. `sent`: event id to seconds."""

    def __init__(self, sqs: Any, queue: str) -> None:
        self._sqs, self._queue = sqs, queue
        self._said: dict[str, datetime] = {}
        self.sent: dict[str, float] = {}

    def send(self, messages: list[Message], began: float) -> None:
        """Wait until they are due, and send them. What fails raises: a storm that was not sent proves nothing."""
        threading.Event().wait(max(0.0, began + messages[-1].at_s - time.monotonic()))
        now, at = datetime.now(UTC), time.monotonic()
        entries = []
        for number, message in enumerate(messages):
            self.sent.setdefault(message.event, at)
            said = self._said.setdefault(message.said_as, now)
            entries.append({"Id": str(number), "MessageBody": body_of(message, said)})
        answer = self._sqs.send_message_batch(QueueUrl=self._queue, Entries=entries)
        assert not answer.get("Failed"), answer


def main() -> int:
    plan = json.loads(Path(sys.argv[1]).read_text())
    messages = storm(plan["count"], plan["machines"], seconds=plan["seconds"], seed=plan["seed"])
    sender = Sender(Session(region_name=REGION).client("sqs", endpoint_url=plan["endpoint"]), plan["queue"])
    batches = [messages[start : start + BATCH] for start in range(0, len(messages), BATCH)]
    began = time.monotonic() + 0.2
    with ThreadPoolExecutor(SENDERS) as pool:
        list(pool.map(lambda batch: sender.send(batch, began), batches))
    print(json.dumps({"began": began, "ended": time.monotonic(), "sent": sender.sent}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
