"""A sender that says what no sender says: refused in words, within the deadline, and nothing is kept or changed."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from plugins.ipc.tests.hostile_sender import COUNT, SLOT, Sender, memory
from weightwire.errors import HandshakeError, PeerLost, TransferError, WeightwireError


def pipe_end() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def descriptors() -> Counter[str]:
    """How many are open of each kind."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{number}").partition(":[")[0]] += 1
    return found


@pytest.fixture
def sender() -> Iterator[Sender]:
    before = descriptors()
    made = Sender()
    weights = [parameter.clone() for parameter in made.model.parameters()]
    yield made
    made.close()
    assert all(map(torch.equal, made.model.parameters(), weights))
    del made.intake, made.sink
    if not descriptors() <= before:
        gc.collect()
    assert descriptors() <= before


IN_RING = [[-1, -1], [-1, -1]]
IN_SEGMENT = [[0, 0], [0, 64]]

MALFORMED: dict[str, bytes] = {
    "a list": b"[]",
    "a number": b"12",
    "text that ends too early": b'{"round": 0',
    "no text": b"\xff\xfe\x00",
    "nested without end": b"[" * 60000,
    "nested without end, within a record": b'{"round": ' * 6000,
    "a number without end": b'{"round": ' + b"9" * 6000 + b"}",
    "too long": b'{"round": "' + b"a" * 100_000 + b'"}',
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_what_is_no_message(sender: Sender, kind: str) -> None:
    sender.say(MALFORMED[kind], memory(1), os.eventfd(0))
    with pytest.raises(TransferError, match="trainer rank 0 sent what is no message"):
        sender.listen()


def test_more_descriptors_than_any_message_has(sender: Sender) -> None:
    sender.say({"round": 0}, *(os.eventfd(0) for _ in range(40)))
    with pytest.raises(TransferError, match="no message"):
        sender.listen()


def test_a_sender_that_hangs_up(sender: Sender) -> None:
    sender.socket.close()
    with pytest.raises(PeerLost, match="trainer rank 0 closed its connection"):
        sender.listen()


def test_an_empty_message_counts_as_the_end(sender: Sender) -> None:
    sender.say(b"", os.eventfd(0))
    with pytest.raises(PeerLost, match="trainer rank 0"):
        sender.listen()


def test_a_sender_that_says_nothing_is_waited_for_until_the_deadline(sender: Sender) -> None:
    sender.deadline.cancel(TransferError("it is over"))
    with pytest.raises(TransferError, match="it is over"):
        sender.listen()


UNFIT: list[dict[str, Any]] = [
    {},
    {"hello": 1},
    {"round": 1},
    {"round": -1},
    {"round": "0"},
    {"round": None},
    {"round": 0.5},
    {"drop": 0},
    {"drop": "0"},
    {"drop": []},
    {"segment": 0},
    {"segment": "0", "memory": 1},
    {"segment": 0, "memory": 0.5},
    {"segment": [], "memory": 1},
    {"segment": {}, "memory": None},
    {"table": "2"},
    {"table": None},
    {"ring": 0, "count": 2},
    {"ring": -64, "count": 2},
    {"ring": 64, "count": 0},
    {"ring": 64, "count": -1},
    {"ring": 64},
    {"ring": "64", "count": "2"},
]


@pytest.mark.parametrize("record", UNFIT, ids=json.dumps)
def test_a_record_that_does_not_fit_is_quoted(sender: Sender, record: dict[str, Any]) -> None:
    sender.say(record, memory(1), os.eventfd(0))
    with pytest.raises(TransferError, match="trainer rank 0 said .*, which does not fit"):
        sender.listen()


def too_few(sender: Sender) -> None:
    sender.say({"segment": 0, "memory": 64})


def too_many(sender: Sender) -> None:
    sender.say({"segment": 0, "memory": 64}, memory(64), memory(64))


def negative_segment(sender: Sender) -> None:
    sender.say({"segment": 0, "memory": -1}, memory(64))


def enormous_segment(sender: Sender) -> None:
    sender.say({"segment": 0, "memory": 1 << 60}, memory(64))


def other_size(sender: Sender) -> None:
    sender.segment(nbytes=sender.nbytes + 4096)


def segment_twice(sender: Sender) -> None:
    sender.segment()
    sender.segment()


def dropped_twice(sender: Sender) -> None:
    sender.segment()
    sender.say({"drop": 0})
    sender.say({"drop": 0})


def table_without_a_file(sender: Sender) -> None:
    sender.say({"table": 2})


def table_that_is_too_long(sender: Sender) -> None:
    sender.table([*IN_RING, [-1, -1]])


def table_that_says_another_length(sender: Sender) -> None:
    sender.table(IN_RING, length=1 << 40)


def table_of_segments_that_are_not_there(sender: Sender) -> None:
    sender.table(IN_SEGMENT)


def table_of_a_dropped_segment(sender: Sender) -> None:
    sender.segment()
    sender.table(IN_SEGMENT)
    sender.say({"drop": 0})
    sender.say({"round": 0})


def table_beyond_a_segment(sender: Sender) -> None:
    sender.segment()
    sender.table([[0, 0], [0, sender.nbytes - 2]])


def ring_twice(sender: Sender) -> None:
    sender.ring()
    sender.ring()


def ring_with_one_descriptor(sender: Sender) -> None:
    sender.say({"ring": SLOT, "count": COUNT}, memory(SLOT * COUNT))


def ring_that_is_too_small(sender: Sender) -> None:
    sender.say({"ring": SLOT, "count": COUNT + 1}, memory(SLOT * COUNT), os.eventfd(0), os.eventfd(0))


def ring_that_is_enormous(sender: Sender) -> None:
    sender.say({"ring": 1 << 40, "count": 1 << 40}, memory(SLOT * COUNT), os.eventfd(0), os.eventfd(0))


def ring_of_pipes(sender: Sender) -> None:
    sender.table(IN_RING)
    sender.say({"ring": SLOT, "count": COUNT}, memory(SLOT * COUNT), pipe_end(), pipe_end())
    sender.say({"round": 0})


def ring_of_memory_files(sender: Sender) -> None:
    sender.table(IN_RING)
    sender.say({"ring": SLOT, "count": COUNT}, memory(SLOT * COUNT), memory(8), memory(8))
    sender.say({"round": 0})


def round_before_a_table(sender: Sender) -> None:
    sender.say({"round": 0})


def round_before_the_ring(sender: Sender) -> None:
    sender.table(IN_RING)
    sender.say({"round": 0})


def message_within_a_ring_round(sender: Sender) -> None:
    sender.table(IN_RING)
    sender.ring()
    sender.say({"round": 0})
    sender.say({"round": 0})


def adopt_what_is_not_there(sender: Sender) -> None:
    sender.say({"round": 0, "adopt": 0}, pipe_end())


def adopt_another_size(sender: Sender) -> None:
    sender.say({"segment": 0, "memory": 64}, memory(64))
    sender.say({"round": 0, "adopt": 0}, pipe_end())


def adopt_without_a_hold(sender: Sender) -> None:
    sender.segment()
    sender.say({"round": 0, "adopt": 0})


def adopt_with_two_holds(sender: Sender) -> None:
    sender.segment()
    sender.say({"round": 0, "adopt": 0}, pipe_end(), pipe_end())


def adopt_a_list(sender: Sender) -> None:
    sender.segment()
    sender.say({"round": 0, "adopt": [0]}, pipe_end())


def adopt_nothing(sender: Sender) -> None:
    sender.segment()
    sender.say({"round": 0, "adopt": None}, pipe_end())


SCRIPTS: list[Callable[[Sender], None]] = [
    too_few,
    too_many,
    negative_segment,
    enormous_segment,
    other_size,
    segment_twice,
    dropped_twice,
    table_without_a_file,
    table_that_is_too_long,
    table_that_says_another_length,
    table_of_segments_that_are_not_there,
    table_of_a_dropped_segment,
    table_beyond_a_segment,
    ring_twice,
    ring_with_one_descriptor,
    ring_that_is_too_small,
    ring_that_is_enormous,
    ring_of_pipes,
    ring_of_memory_files,
    round_before_a_table,
    round_before_the_ring,
    message_within_a_ring_round,
    adopt_what_is_not_there,
    adopt_another_size,
    adopt_without_a_hold,
    adopt_with_two_holds,
    adopt_a_list,
    adopt_nothing,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_sender_out_of_step_is_refused(sender: Sender, script: Callable[[Sender], None]) -> None:
    script(sender)
    with pytest.raises((HandshakeError, TransferError)) as caught:
        sender.listen()
    assert "did not end" not in str(caught.value)


def test_a_signal_that_would_block_does_not_hold_the_worker_up(sender: Sender) -> None:
    filled, free = os.eventfd(0, os.EFD_CLOEXEC), os.eventfd(COUNT, os.EFD_CLOEXEC)
    assert not fcntl.fcntl(filled, fcntl.F_GETFL) & os.O_NONBLOCK
    sender.table(IN_RING)
    sender.say({"ring": SLOT, "count": COUNT}, memory(SLOT * COUNT), filled, free)
    sender.say({"round": 0})
    sender.deadline.cancel(TransferError("it is over"))
    with pytest.raises(WeightwireError, match="it is over|signal"):
        sender.listen()


def test_a_good_sender_is_read(sender: Sender) -> None:
    content = torch.arange(sender.nbytes, dtype=torch.uint8)
    sender.say({"segment": 4, "memory": sender.nbytes}, memory(sender.nbytes, content))
    sender.table([[4, 0], [-1, -1]])
    filled, free = sender.ring()
    # Descriptors that nobody asked for are closed.
    sender.say({"round": 0}, os.eventfd(0), os.eventfd(0))
    filled.give()
    sender.listen()
    assert json.loads(sender.socket.recv(1000)) == {"read": 0}
    assert torch.equal(sender.sink.targets(["first"])["first"].view(torch.uint8), content[:64])
    filled.close()
    free.close()
