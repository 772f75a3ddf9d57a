"""What lies ready at a producer, in whatever order calls come."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weightwire_rdt.shelf import Shelf

SOON, LATE = 0.01, 20.0


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


def parcel(*ordinals: int) -> list[Any]:
    return [list(ordinals), f"references of {ordinals}"]


def test_parcels_of_several_workers() -> None:
    async def scene() -> None:
        shelf = Shelf()
        waiting = asyncio.ensure_future(shelf.take(1, 0, 0, LATE))
        shelf.put(1, 1, 0, parcel(0))
        shelf.put(1, 0, 0, parcel(0, 1))
        assert await waiting == [parcel(0, 1)]
        shelf.put(1, 0, 1, parcel(2))
        assert await shelf.take(1, 0, 0, SOON) == [parcel(0, 1), parcel(2)]
        assert await shelf.take(1, 0, 1, SOON) == [parcel(2)]
        assert await shelf.take(1, 0, 2, SOON) == []
        assert await shelf.take(1, 1, 0, SOON) == [parcel(0)]

    run(scene())


def test_what_was_read_is_heard_once_and_kept_no_longer() -> None:
    async def scene() -> None:
        shelf = Shelf()
        for number, content in enumerate([parcel(0, 1), parcel(2)]):
            shelf.put(3, 0, number, content)
        hearing = asyncio.ensure_future(shelf.heard(3, LATE))
        await asyncio.sleep(0)
        shelf.read(3, 0, [0, 1])
        assert await hearing == [(0, 0), (0, 1)]
        assert await shelf.heard(3, SOON) == []
        assert await shelf.take(3, 0, 0, SOON) == []
        assert await shelf.take(3, 0, 1, SOON) == [parcel(2)]

    run(scene())


def test_only_the_newest_round_counts() -> None:
    async def scene() -> None:
        shelf = Shelf()
        early = asyncio.ensure_future(shelf.take(2, 0, 0, LATE))
        await asyncio.sleep(0)
        shelf.put(1, 0, 0, parcel(0))
        shelf.put(2, 0, 0, parcel(0, 1))
        assert await early == [parcel(0, 1)]
        shelf.put(1, 0, 1, parcel(1))
        shelf.read(1, 0, [0])
        assert await shelf.take(1, 0, 0, SOON) == []
        assert await shelf.heard(1, SOON) == []
        assert await shelf.heard(2, SOON) == []

    run(scene())


@given(st.permutations(range(6)), st.integers(1, 3))
def test_parcels_that_are_put_in_any_order(order: list[int], step: int) -> None:
    async def scene() -> None:
        shelf, found = Shelf(), list[Any]()

        async def take() -> None:
            while len(found) < 6:
                found.extend(await shelf.take(5, 0, len(found), LATE))

        taking = asyncio.ensure_future(take())
        for place, number in enumerate(order):
            shelf.put(5, 0, number, parcel(number))
            if place % step == 0:
                await asyncio.sleep(0)
        await taking
        assert found == [parcel(number) for number in range(6)]

    run(scene())
