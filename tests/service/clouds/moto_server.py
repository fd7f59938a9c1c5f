"""An emulator of AWS as a process of its own on loopback, which is asked over HTTP as AWS is; and an account in it."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from service.clouds.aws.queue_worker import Clients

REGION = "us-east-1"
START_S = 30.0
TERRAFORM = Path(__file__).resolve().parents[3] / "deploy" / "terraform" / "aws"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true"}


@dataclass
class Account:
    """A queue with a dead-letter queue, and a rule of EventBridge that sends the events of machines to it."""

    url: str
    clients: Clients
    queue_url: str = ""
    dlq_url: str = ""
    events: Any = None
    name: str = field(default_factory=lambda: f"liver-{uuid4().hex[:8]}")

    def make(self, *, receives: int = 5) -> None:
        from boto3.session import Session

        sqs, self.events = self.clients.sqs, Session(region_name=REGION).client("events", endpoint_url=self.url)
        self.dlq_url = sqs.create_queue(QueueName=f"{self.name}-dlq")["QueueUrl"]
        policy = {"deadLetterTargetArn": self.arn_of(self.dlq_url), "maxReceiveCount": str(receives)}
        made = sqs.create_queue(QueueName=self.name, Attributes={"RedrivePolicy": json.dumps(policy)})
        self.queue_url = made["QueueUrl"]
        pattern = {"source": ["aws.ec2", "aws.autoscaling", "aws.health"]}
        rule_arn = self.events.put_rule(Name=self.name, EventPattern=json.dumps(pattern))["RuleArn"]
        sqs.set_queue_attributes(QueueUrl=self.queue_url, Attributes={"Policy": self._policy(rule_arn)})
        self.events.put_targets(Rule=self.name, Targets=[{"Id": "1", "Arn": self.arn_of(self.queue_url)}])

    def _policy(self, *rule_arns: str) -> str:
        """Of the queue, as the Terraform module makes it."""
        text = (TERRAFORM / "queue-policy.json").read_text()
        named = text.replace("${queue_arn}", self.arn_of(self.queue_url))
        return named.replace("${rule_arns}", json.dumps(rule_arns))

    def arn_of(self, url: str) -> str:
        found = self.clients.sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
        return found["Attributes"]["QueueArn"]

    def emit(self, kind: str, detail: dict[str, Any], *, source: str = "aws.ec2", at: datetime | None = None) -> None:
        """An event, by way of EventBridge."""
        entry = {"Source": source, "DetailType": kind, "Detail": json.dumps(detail), "Time": at or datetime.now(UTC)}
        assert self.events.put_events(Entries=[entry])["FailedEntryCount"] == 0

    def warn(self, machine: str, *, at: datetime | None = None) -> None:
        """A spot interruption warning."""
        detail = {"instance-id": machine, "instance-action": "terminate"}
        self.emit("EC2 Spot Instance Interruption Warning", detail, at=at)

    def put(self, body: str) -> None:
        """A message right into the queue."""
        self.clients.sqs.send_message(QueueUrl=self.queue_url, MessageBody=body)

    def left(self, url: str | None = None) -> int:
        """Messages in the queue, those that somebody works on included."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.clients.sqs.get_queue_attributes(QueueUrl=url or self.queue_url, AttributeNames=names)
        return sum(int(value) for value in found["Attributes"].values())


@contextmanager
def moto_server(folder: Path) -> Iterator[str]:
    """Its address, until the end of the block."""
    log = folder / "moto.log"
    command = [sys.executable, "-m", "tests.service.clouds.moto_process", "-H", "127.0.0.1", "-p", "0"]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **CREDENTIALS, "PYTHONUNBUFFERED": "1"}
        )
    try:
        yield _address(process, log)
    finally:
        process.terminate()
        process.wait(10)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    until, pause = time.monotonic() + START_S, threading.Event()
    while time.monotonic() < until and process.poll() is None:
        found = re.search(r"Running on (http://127\.0\.0\.1:\d+)", log.read_text())
        if found:
            return found.group(1)
        pause.wait(0.05)
    raise AssertionError(f"moto has not started:\n{log.read_text()[-2_000:]}")
