"""moto's server, in which a queue of thousands costs no more than SQS's: `python -m tests.service.clouds.moto_process`.

For each message that it takes in or hands out, moto 5 counts the whole queue several times, reads the clock twice for
each message in it, and forgets the numbers: 600 messages take half a minute. The answers below are the same without.
Of the calls about hooks of Auto Scaling groups it knows two not at all: they answer as where nothing waits.
"""

from __future__ import annotations

from moto.autoscaling.exceptions import ValidationError
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.utils import unix_time, unix_time_millis
from moto.server import main
from moto.sqs.models import Message, Queue, SQSBackend


def is_retained(self: SQSBackend, queue_name: str, message: Message) -> bool:
    """Whether it is not too old to be handed out."""
    retained_s = self.get_queue(queue_name).message_retention_period  # type: ignore[attr-defined]
    return retained_s + (message.sent_timestamp or 0) / 1000 > unix_time()


def visible_messages(self: Queue) -> list[Message]:
    """Those that may be handed out now."""
    now = unix_time_millis()
    return [message for message in self._messages if now > message.visible_at and now >= message.delayed_until]


def hidden(self: Queue) -> int:
    """How many somebody works on."""
    now = unix_time_millis()
    return sum(now <= message.visible_at for message in self._messages)


def delete_message(self: Queue, receipt_handle: str) -> None:
    """With the lock under which messages are added: moto 5 makes a new list without it, and what was sent meanwhile is
    never handed out."""
    with self._messages_lock:
        _delete_message(self, receipt_handle)


def delayed(self: Queue) -> int:
    """How many are not to be handed out yet."""
    now = unix_time_millis()
    return sum(now < message.delayed_until for message in self._messages)


def nothing_waits(self: AutoScalingResponse) -> str:
    """As Auto Scaling says it of a token that nobody has."""
    raise ValidationError(f"No active Lifecycle Action found with token {self._get_param('LifecycleActionToken')}")


_delete_message = Queue.delete_message
Queue.delete_message = delete_message  # type: ignore[method-assign]
AutoScalingResponse.record_lifecycle_action_heartbeat = nothing_waits  # type: ignore[attr-defined]
AutoScalingResponse.complete_lifecycle_action = nothing_waits  # type: ignore[attr-defined]
SQSBackend.is_message_valid_based_on_retention_period = is_retained
Queue.messages = property(visible_messages)  # type: ignore[assignment]
Queue.approximate_number_of_messages_not_visible = property(hidden)  # type: ignore[assignment]
Queue.approximate_number_of_messages_delayed = property(delayed)  # type: ignore[assignment]

if __name__ == "__main__":
    main()
