"""The queue of the tests' moto keeps what is sent while another message is deleted, as SQS does."""

import threading
from typing import Any

import pytest

pytest.importorskip("moto")

from tests.service.clouds.moto_process import Message, Queue

HELD_UP_S = 0.3


class HeldUp(Queue):
    """Whoever deletes is held up once the rest of the messages is chosen, and before it takes their place."""

    def __init__(self) -> None:
        self.chosen, self.added = threading.Event(), threading.Event()
        super().__init__("queue", "us-east-1", "123456789012")

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_messages" and hasattr(self, "_messages"):
            self.chosen.set()
            self.added.wait(HELD_UP_S)
        super().__setattr__(name, value)


def test_a_message_that_is_sent_while_another_is_deleted_is_not_lost():
    made: Any = HeldUp(), Message("1", "first"), Message("2", "second")
    queue, first, second = made
    queue.add_message(first)
    first.mark_received()
    deleting = threading.Thread(target=queue.delete_message, args=(first.receipt_handle,))

    def send() -> None:
        assert queue.chosen.wait(10)
        queue.add_message(second)
        queue.added.set()

    sending = threading.Thread(target=send)
    for thread in (deleting, sending):
        thread.start()
    for thread in (deleting, sending):
        thread.join(10)
    assert [message.id for message in queue._messages] == ["2"]
