"""What a storm falls on: an emulator of SQS, a real service that can be killed, and its database, which can be away."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from service.settings import ServiceSettings
from tests.benchmarks.service_host import Host
from tests.cluster.real_service import real_service, service_folder
from tests.service.clouds.moto_server import CREDENTIALS, REGION, Account, moto_server

_SERVE = ("-m", "service.cli.main", "serve")


class StormPlace:
    """`kill` and `start` may follow each other as often as wanted: the port and the data stay."""

    def __init__(self, folder: Path, account: Account, settings: dict[str, str]) -> None:
        self._folder, self._settings = folder, settings
        self.account = account
        self._running: ExitStack | None = None
        self._host: Host | None = None

    @property
    def host(self) -> Host:
        """The service that was started last."""
        assert self._host is not None
        return self._host

    @property
    def url(self) -> str:
        """The same for every start."""
        return self.host.url

    def token(self, role: str) -> str:
        """The first token of this role."""
        return self.host.token(role)

    def start(self) -> None:
        """Returns when it answers."""
        if self._host is not None:
            self._settings["PORT"] = str(urlsplit(self._host.url).port)
        running = ExitStack()
        self._host = running.enter_context(real_service(Host, self._folder, _SERVE, self._settings))
        self._running = running

    def kill(self) -> None:
        """Without a word before."""
        self.host.process.kill()
        self.stop()

    def stop(self) -> None:
        """In order, if it runs."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def pause_database(self, seconds: float) -> None:
        """Its processes are stopped, as where a machine stands still: it answers nobody and closes nothing."""
        stopped = self.host.database_pids()
        for pid in stopped:
            _send(pid, signal.SIGSTOP)
        try:
            threading.Event().wait(seconds)
        finally:
            for pid in stopped:
                _send(pid, signal.SIGCONT)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """What the database answers."""
        with self.host.connect() as connection:
            return connection.execute(statement.encode()).fetchall()


class Faults(threading.Thread):
    """Kill the service, take the database away, kill the service again, one after the other. `done`: what was done, how
    long it took and how many messages were in the queue at its beginning. `error`: why it could not go on."""

    def __init__(self, place: StormPlace, *, kills: int, away_s: float, first_in_s: float) -> None:
        super().__init__(name="faults", daemon=True)
        self._place, self._kills, self._away_s, self._first_in_s = place, kills, away_s, first_in_s
        self._began = time.monotonic()
        self.done: list[dict[str, Any]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Until all are done."""
        try:
            threading.Event().wait(self._first_in_s)
            if self._kills:
                self._do("service killed", self._kill)
            if self._away_s:
                threading.Event().wait(0.5)
                self._do("database away", lambda: self._place.pause_database(self._away_s))
            for _ in range(1, self._kills):
                threading.Event().wait(0.5)
                self._do("service killed", self._kill)
        except BaseException as error:
            self.error = error

    def _kill(self) -> None:
        self._place.kill()
        self._place.start()

    def _do(self, what: str, act: Callable[[], None]) -> None:
        left, at = self._place.account.left(), time.monotonic()
        act()
        took_s = round(time.monotonic() - at, 1)
        self.done.append({"what": what, "at_s": round(at - self._began, 1), "for_s": took_s, "queued": left})


@contextmanager
def storm_place(settings: dict[str, str]) -> Iterator[StormPlace]:
    """An emulator with an account, and the service that reads its queue. `settings`: as for `real_service`."""
    from service.clouds.aws.queue_worker import make_clients

    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, CREDENTIALS))
        folder = stack.enter_context(service_folder())
        endpoint = stack.enter_context(moto_server(folder))
        account = Account(endpoint, make_clients(ServiceSettings(aws_endpoint_url=endpoint, aws_region=REGION)))
        account.make()
        given = {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": REGION, "AWS_QUEUE_URL": account.queue_url}
        place = StormPlace(folder, account, settings | given)
        stack.callback(place.stop)
        place.start()
        yield place


def emulator_ms(account: Account, probes: int) -> list[float]:
    """From the sending of one message until a reader that waits for it has it, where nothing else reads: the emulator's
    own share, and that of boto3. Ordered."""
    sqs, found = account.clients.sqs, []
    queue = sqs.create_queue(QueueName=f"{account.name}-probe")["QueueUrl"]
    received: list[tuple[str, float]] = []
    ending = threading.Event()

    def read() -> None:
        while not ending.is_set():
            answer = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10, WaitTimeSeconds=1)
            received.extend((item["MessageId"], time.monotonic()) for item in answer.get("Messages", ()))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    sent = {}
    for _ in range(probes):
        at = time.monotonic()
        sent[sqs.send_message(QueueUrl=queue, MessageBody="probe")["MessageId"]] = at
        threading.Event().wait(0.05)
    until = time.monotonic() + 10
    while len(received) < probes and time.monotonic() < until:
        threading.Event().wait(0.05)
    ending.set()
    reader.join(5)
    sqs.delete_queue(QueueUrl=queue)
    found += [(at - sent[name]) * 1e3 for name, at in received]
    return sorted(found)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # A connection of the database may have ended meanwhile.
        os.kill(pid, number)


def as_monotonic(rows: list[tuple[Any, ...]]) -> dict[str, float]:
    """Names with times of the wall clock, by the monotonic clock of this machine."""
    behind = time.time() - time.monotonic()
    return {str(name): at.timestamp() - behind for name, at in rows}
