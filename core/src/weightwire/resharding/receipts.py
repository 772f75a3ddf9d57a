"""What messages are called where their checksums are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from weightwire.checksums import Checksums
from weightwire.layout import ParamMeta
from weightwire.resharding.incoming import Message


def message_number(sender: int, worker: int, ordinal: int) -> int:
    """What a message is called in checksums."""
    return (sender << 64) + (worker << 32) + ordinal


def receiving_worker(number: int) -> int:
    """The worker rank that message `number` went to."""
    return number >> 32 & 0xFFFFFFFF


def compare_received(
    checksums: Checksums,
    sent: Iterable[Mapping[str, int]],
    messages: Sequence[Message],
    worker: int,
    metadata: Sequence[ParamMeta],
    *,
    transport: str,
) -> None:
    """Compare what a worker rank received with what trainer ranks noted.

    Args:
        checksums: What it received.
        sent: What each trainer rank sent, to any worker.
        messages: What was to come.
        worker: The worker rank.
        metadata: The parameters.
        transport: Backend name.

    Raises:
        TransferError: Other bytes arrived; their parameters are named.
    """
    names = {
        message_number(message.sender, worker, message.ordinal): [metadata[place].name for place in message.parameters]
        for message in messages
    }
    for values in sent:
        mine = {key: value for key, value in values.items() if receiving_worker(int(key)) == worker}
        checksums.compare(mine, names.__getitem__, transport=transport)
