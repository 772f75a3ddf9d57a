"""An actor of the benchmark, which needs no torch."""

from __future__ import annotations

import asyncio
from typing import Any


class Desk:
    """An actor over which a reference goes to the receiver, and word of it back."""

    def __init__(self) -> None:
        self._here: asyncio.Queue[Any] = asyncio.Queue()
        self._taken: asyncio.Queue[bool] = asyncio.Queue()

    async def put(self, boxed: list[Any]) -> bool:
        """Lay a reference down; returns when what it names has been taken."""
        await self._here.put(boxed)
        return await self._taken.get()

    async def get(self) -> list[Any]:
        """The next one."""
        boxed: list[Any] = await self._here.get()
        return boxed

    async def taken(self) -> None:
        """It has been."""
        await self._taken.put(True)
