"""The store that runs before the handoff that will need it."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from agent.driver.node_context import Node
from agent.driver.spare_store import RETRY_S, SpareStore
from agent.supervisor.records import StoreKey
from agent.supervisor.stores import StoreError
from liver_core.handoff import StoreAddress


class Stores:
    """`running` in the order of their starts; the next start fails with `error`, and none ends before `go`."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self.started: list[int] = []
        self.error = ""
        self.go = asyncio.Event()
        self.go.set()

    async def host(self, key: StoreKey, host: str) -> StoreAddress:
        self.started.append(key.generation)
        await self.go.wait()
        if self.error:
            raise StoreError(self.error)
        if key.generation not in self.running:
            self.running.append(key.generation)
        return StoreAddress(host=host, port=4_000 + key.generation)

    async def retire(self, key: StoreKey) -> None:
        self.running.remove(key.generation)


class Scene:
    def __init__(self) -> None:
        self.stores, self.now = Stores(), 100.0
        node: Any = SimpleNamespace(stores=self.stores, private_address="127.0.0.1", now=lambda: self.now)
        self.spare = SpareStore(cast(Node, node), "job")

    async def keep(self, generation: int | None) -> None:
        await self.spare.keep(generation)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_one_store_runs_ahead_and_follows_the_number_of_the_next_handoff() -> None:
    async def run() -> None:
        scene = Scene()
        for generation in (2, 2, 3, 3, 2):
            await scene.keep(generation)
        assert scene.stores.started == [2, 3, 2]
        assert scene.stores.running == [2]
        await scene.keep(None)
        assert (scene.stores.running, scene.spare.key) == ([], None)

    asyncio.run(run())


def test_what_a_handoff_uses_is_no_spare_any_more_and_is_not_ended() -> None:
    async def run() -> None:
        scene = Scene()
        await scene.keep(2)
        scene.spare.use(5)
        assert scene.spare.key == StoreKey("job", 2), "the store of another number"
        scene.spare.use(2)
        await scene.keep(3)
        assert scene.stores.running == [2, 3]
        await scene.keep(None)
        assert scene.stores.running == [2]

    asyncio.run(run())


def test_a_start_that_takes_long_holds_up_nothing_and_is_not_repeated() -> None:
    async def run() -> None:
        scene = Scene()
        scene.stores.go.clear()
        for generation in (2, 2, 3, None):
            await scene.keep(generation)
        assert scene.stores.started == [2]
        assert scene.spare.is_starting, "the job must not be forgotten now: nobody would end this store"
        scene.stores.go.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not scene.spare.is_starting
        await scene.keep(3)
        await scene.keep(3)
        assert (scene.stores.running, scene.spare.key) == ([3], StoreKey("job", 3))
        await scene.spare.close()

    asyncio.run(run())


def test_a_start_that_fails_is_tried_again_after_a_while() -> None:
    async def run() -> None:
        scene = Scene()
        scene.stores.error = "no port"
        await scene.keep(2)
        assert scene.spare.key is None
        await scene.keep(2)
        assert scene.stores.started == [2]
        scene.stores.error = ""
        scene.now += RETRY_S
        await scene.keep(2)
        assert (scene.stores.started, scene.stores.running) == ([2, 2], [2])

    asyncio.run(run())
