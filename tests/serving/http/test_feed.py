"""Messages for many viewers: one producer runs while somebody watches, and no viewer delays another."""

import asyncio
import math
from typing import Any

import pytest

from serving.grpc_server.statuses import LimitError, SlowReaderError
from serving.http_server.feed import Feed

FIRST = b"history"


class Producer:
    """Producer of numbered messages. Each message needs a call of `tick`."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.calls = 0
        self._fails = fails
        self._ticks = asyncio.Semaphore(0)

    async def __call__(self) -> bytes:
        await self._ticks.acquire()
        self.calls += 1
        if self.calls in self._fails:
            raise RuntimeError("no state")
        return str(self.calls).encode()

    def tick(self) -> None:
        self._ticks.release()


def feed_of(producer: Producer, **limits: Any) -> Feed:
    """Return a feed without pauses between messages."""
    return Feed(producer, 0.0, max_messages_per_s=math.inf, **limits)


class Viewer:
    """Viewer whose writes can be blocked."""

    def __init__(self, feed: Feed) -> None:
        self.got: list[bytes] = []
        self.free = asyncio.Event()
        self.free.set()
        self._new = asyncio.Condition()
        self.task = asyncio.ensure_future(feed.watch(self.write, FIRST))

    async def write(self, message: bytes) -> None:
        self.got.append(message)
        async with self._new:
            self._new.notify_all()
        await self.free.wait()

    async def have(self, message: bytes) -> None:
        async with asyncio.timeout(30), self._new:
            await self._new.wait_for(lambda: message in self.got)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def test_a_message_is_made_once_for_all_viewers():
    async def run() -> None:
        producer = Producer()
        feed = feed_of(producer)
        viewers = [Viewer(feed) for _ in range(20)]
        for number in range(1, 4):
            for viewer in viewers:
                await viewer.have(str(number - 1).encode() if number > 1 else FIRST)
            producer.tick()
        for viewer in viewers:
            await viewer.have(b"3")
            assert viewer.got == [FIRST, b"1", b"2", b"3"]
        assert producer.calls == 3
        for viewer in viewers:
            await viewer.leave()

    asyncio.run(run())


def test_nothing_is_made_while_nobody_watches():
    async def run() -> None:
        producer = Producer()
        feed = feed_of(producer)
        for _ in range(5):
            producer.tick()
        await asyncio.sleep(0)
        assert producer.calls == 0
        viewer = Viewer(feed)
        await viewer.have(b"5")
        await viewer.leave()
        producer.tick()
        for _ in range(10):
            await asyncio.sleep(0)
        assert producer.calls == 5
        other = Viewer(feed)
        await other.have(b"6")
        await other.leave()

    asyncio.run(run())


def test_slow_viewers_miss_messages_and_others_do_not():
    async def run() -> None:
        producer = Producer()
        feed = feed_of(producer)
        slow, quick = Viewer(feed), Viewer(feed)
        slow.free.clear()
        await slow.have(FIRST)
        for number in range(1, 51):
            producer.tick()
            await quick.have(str(number).encode())
        slow.free.set()
        await slow.have(b"50")
        assert slow.got == [FIRST, b"50"]
        assert len(quick.got) == 51
        await slow.leave()
        await quick.leave()

    asyncio.run(run())


def test_viewers_have_a_limit_and_places_become_free():
    async def run() -> None:
        feed = feed_of(Producer(), max_viewers=2)
        one, two, three = (Viewer(feed) for _ in range(3))
        with pytest.raises(LimitError, match="2 pages already watch"):
            await three.task
        await one.leave()
        four = Viewer(feed)
        await four.have(FIRST)
        await two.leave()
        await four.leave()

    asyncio.run(run())


def test_many_viewers_get_messages_less_often(monkeypatch: pytest.MonkeyPatch):
    """At most 20 messages a second for all viewers together, and at most one each half second for each viewer."""
    pauses: list[float] = []

    async def run() -> None:
        loop, sleep = asyncio.get_running_loop(), asyncio.sleep
        monkeypatch.setattr(loop, "time", lambda: 0.0)

        async def pause(seconds: float) -> None:
            pauses.append(seconds)
            await sleep(0)

        monkeypatch.setattr("serving.http_server.feed.asyncio.sleep", pause)
        for count in (1, 10, 40):
            producer = Producer()
            feed = Feed(producer, 0.5)
            viewers = [Viewer(feed) for _ in range(count)]
            for viewer in viewers:
                await viewer.have(FIRST)
            producer.tick()
            for viewer in viewers:
                await viewer.have(b"1")
            for viewer in viewers:
                await viewer.leave()

    asyncio.run(run())
    assert pauses == [0.5, 0.5, 2.0]


def test_viewer_that_reads_nothing_is_cut_off():
    async def run() -> None:
        feed = feed_of(Producer(), max_write_s=0.01)
        viewer = Viewer(feed)
        viewer.free.clear()
        with pytest.raises(SlowReaderError, match=r"has read nothing for 0.01 s"):
            await viewer.task

    asyncio.run(run())


def test_failed_message_is_logged_and_the_next_one_arrives(caplog: pytest.LogCaptureFixture):
    async def run() -> None:
        producer = Producer(fails=(1,))
        viewer = Viewer(feed_of(producer))
        producer.tick()
        producer.tick()
        await viewer.have(b"2")
        assert viewer.got == [FIRST, b"2"]
        await viewer.leave()

    asyncio.run(run())
    assert "could not be read" in caplog.text
