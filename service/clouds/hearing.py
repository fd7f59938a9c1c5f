"""All the channels of cloud accounts that this replica reads itself."""

from datetime import datetime

from service.clouds.aws import queue_worker
from service.clouds.aws.account_look import look_at_queue
from service.clouds.aws.queue_worker import QueueWorker
from service.clouds.gcp import project_look
from service.clouds.gcp.operation_list import OperationWorker
from service.clouds.gcp.project_look import look_at_operations, look_at_subscription
from service.clouds.gcp.subscription_worker import SubscriptionWorker
from service.clouds.lacks import ChannelCheck, OwnView, reader_finding
from service.context import Context
from service.notices.rules import ACCOUNT_CHANNELS, AWS_QUEUE, GCP_OPERATIONS, GCP_PUBSUB
from service.settings import ServiceSettings


class AccountChannels:
    """Begun and ended together. One that is not configured does nothing, and says how to turn it on."""

    def __init__(self, context: Context) -> None:
        self._workers = QueueWorker(context), SubscriptionWorker(context), OperationWorker(context)

    def start(self) -> None:
        """Begin to read those that are configured."""
        for worker in self._workers:
            worker.start()

    def stop(self) -> None:
        """Ask for nothing more."""
        for worker in self._workers:
            worker.stop()

    def doubts(self) -> list[str]:
        """Which of them cannot be read, and why."""
        return [f"{worker.what} cannot be read: {worker.trouble}" for worker in self._workers if worker.trouble]


def look_at_all(settings: ServiceSettings, now: datetime, own: OwnView | None = None) -> list[ChannelCheck]:
    """Each channel with what it lacks, and the line that turns it on where it is off. Never raises."""
    own = own or OwnView()
    looked = (
        (AWS_QUEUE, settings.aws_queue_url, queue_worker.OFF, look_at_queue),
        (GCP_PUBSUB, settings.gcp_subscription or settings.gcp_push_audience, project_look.OFF[GCP_PUBSUB],
         look_at_subscription),
        (GCP_OPERATIONS, settings.gcp_project, project_look.OFF[GCP_OPERATIONS], look_at_operations),
    )  # fmt: skip
    return [
        ChannelCheck(
            channel=channel,
            provider=ACCOUNT_CHANNELS[channel],
            on=bool(setting),
            turn_on="" if setting else off,
            findings=[*reader_finding(own.troubles.get(channel, "")), *look(settings, now, own)] if setting else [],
        )
        for channel, setting, off, look in looked
    ]
