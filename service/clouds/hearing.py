"""All the channels of cloud accounts that this replica reads itself."""

from service.clouds.aws.queue_worker import QueueWorker
from service.clouds.gcp.operation_list import OperationWorker
from service.clouds.gcp.subscription_worker import SubscriptionWorker
from service.context import Context


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
