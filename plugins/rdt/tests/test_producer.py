"""The producer's protocol, without Ray: whatever order calls come in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import MessageError
from weightwire_rdt.cluster import unwrapped
from weightwire_rdt.producer import Producer
from weightwire_rdt.requests import Holding

HOLDING = Holding(
    rank=1, names=["a", "b"], itemsizes=[4, 4], elements=[6, 6], groups=[0, 0], buffer_bytes=64, direct_bytes=32
)
LINK = "0123-1"
SOON = 0.01
LATE = 30.0


def request(count: int, name: str = "a") -> str:
    return json.dumps({"parameters": [name], "messages": [[[[0, 0, [count], [1]]]]]})


NOTHING = '{"parameters":[],"messages":[]}'


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 20))


async def opened(workers: int) -> Producer:
    producer = Producer()
    assert await producer.open(LINK, HOLDING.to_json(), workers) == {}
    return producer


async def refused(answer: Coroutine[Any, Any, Any], words: str) -> None:
    """An error is an answer in JSON types, so that Ray pickles no exception."""
    record = await answer
    assert json.loads(json.dumps(record)) == record
    with pytest.raises(MessageError, match=words):
        unwrapped(record)


def test_requests_of_all_workers() -> None:
    async def scene() -> None:
        producer = await opened(2)
        waiting = asyncio.ensure_future(producer.requests(LINK, LATE))
        assert await producer.request(LINK, 1, request(3)) == {}
        assert await producer.request(LINK, 0, NOTHING) == {}
        assert await waiting == {"requests": {1: request(3), 0: NOTHING}}
        assert await producer.requests(LINK, LATE) == {"requests": {1: request(3), 0: NOTHING}}

    run(scene())


def test_requests_that_do_not_all_come_in_time() -> None:
    async def scene() -> None:
        producer = await opened(3)
        assert await producer.requests(LINK, SOON) == {"requests": {}}
        await producer.request(LINK, 2, request(1))
        assert await producer.requests(LINK, SOON) == {"requests": {2: request(1)}}
        assert await producer.requests(LINK, 0) == {"requests": {2: request(1)}}

    run(scene())


def test_what_is_refused() -> None:
    async def scene() -> None:
        producer = Producer()
        await refused(producer.request(LINK, 0, NOTHING), f"this trainer rank has no link '{LINK}'")
        await producer.open(LINK, HOLDING.to_json(), 2)
        for worker in (-1, 2, 1 << 70, True, 1.0, "0", None, [0]):
            await refused(producer.request(LINK, worker, NOTHING), "no worker rank .*: there are 2")  # type: ignore[arg-type]
        await refused(producer.request(LINK, 0, request(7)), "worker rank 0 to trainer rank 1 .*'a'.* has 6")
        await refused(producer.request(LINK, 0, request(1, "c")), "names 'c', which is not declared")
        await refused(producer.request(LINK, 0, "__import__('os')"), "is no JSON")
        await refused(producer.open(LINK, {"rank": 1}, 2), "not what a trainer rank holds")
        # Nothing of that has been taken, nor has it spoiled the link.
        assert await producer.requests(LINK, 0) == {"requests": {}}
        assert await producer.request(LINK, 0, request(6)) == {}

    run(scene())


def test_a_link_that_is_none() -> None:
    async def scene() -> None:
        producer = await opened(1)
        for link in ("", "0123-2", 5, None, ["0123-1"]):
            await refused(producer.request(link, 0, NOTHING), "has no link")  # type: ignore[arg-type]

    run(scene())


def test_asked_twice() -> None:
    async def scene() -> None:
        producer = await opened(2)
        for _ in range(3):
            assert await producer.request(LINK, 0, request(2)) == {}
        await refused(producer.request(LINK, 0, request(3)), "worker rank 0 has asked for something else on this link")
        assert await producer.request(LINK, 0, request(2)) == {}
        assert await producer.requests(LINK, SOON) == {"requests": {0: request(2)}}

    run(scene())


def test_a_link_that_was_closed() -> None:
    async def scene() -> None:
        producer = await opened(1)
        await producer.request(LINK, 0, request(1))
        await producer.open("other", HOLDING.to_json(), 1)
        await producer.close(LINK)
        await producer.close(LINK)
        await refused(producer.request(LINK, 0, request(1)), "has no link")
        assert await producer.request("other", 0, request(5)) == {}
        # Opened again it is a new one.
        await producer.open(LINK, HOLDING.to_json(), 1)
        assert await producer.requests(LINK, SOON) == {"requests": {}}
        assert await producer.request(LINK, 0, request(2)) == {}
        assert await producer.requests(LINK, LATE) == {"requests": {0: request(2)}}

    run(scene())


def test_a_link_that_is_closed_while_its_requests_are_waited_for() -> None:
    async def scene() -> None:
        producer = await opened(1)
        waiting = asyncio.ensure_future(producer.requests(LINK, SOON))
        await asyncio.sleep(0)
        await producer.close(LINK)
        assert await waiting == {"requests": {}}

    run(scene())


def test_whoever_collects_from_a_closed_link_is_told() -> None:
    async def scene() -> None:
        producer = await opened(1)
        await producer.close(LINK)
        await refused(producer.requests(LINK, SOON), "has no link")

    run(scene())


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["one", "two"]), st.sampled_from([0, 1, 2, 3]), st.sampled_from([1, 2, 2, 2, 7]), st.booleans()
    ),
    max_size=25,
)


@given(CALLS, st.integers(1, 3))
def test_any_interleaving_of_requests(calls: list[tuple[str, int, int, bool]], workers: int) -> None:
    """The first valid request of each worker is the one that counts, on each link by itself."""

    async def scene() -> None:
        producer = Producer()
        counted: dict[str, dict[int, str]] = {}
        waiting = {}
        for link in ("one", "two"):
            counted[link] = {}
            await producer.open(link, HOLDING.to_json(), workers)
            waiting[link] = asyncio.ensure_future(producer.requests(link, LATE))
        for link, worker, count, pause in calls:
            valid = worker < workers and count <= 6
            good = valid and counted[link].setdefault(worker, request(count)) == request(count)
            answer = await asyncio.ensure_future(producer.request(link, worker, request(count)))
            assert ("error" not in answer) == good
            if pause:
                await asyncio.sleep(0)
        for link, found in counted.items():
            complete = len(found) == workers
            done, _ = await asyncio.wait([waiting[link]], timeout=20 if complete else 0)
            assert bool(done) == complete
            waiting[link].cancel()
            assert await producer.requests(link, 0) == {"requests": found}

    run(scene())
