"""Requests as an attacker would write them: refused in words, or such that they can be served."""

from __future__ import annotations

import copy
import json
import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plugins.rdt.tests.test_holdings import CPU, Pulls, Wire
from weightwire.checksums import Checksums
from weightwire.deadline import Deadline
from weightwire.errors import MessageError
from weightwire.resharding.outgoing import Sending, new_ring
from weightwire_rdt.holdings import outgoing_of
from weightwire_rdt.requests import Holding, Request

HOLDING = Holding(
    rank=4,
    names=["a", "b", "c", "elsewhere", "d", "e"],
    itemsizes=[1, 2, 4, 4, 8, 1],
    elements=[10, 40, 6, 0, 12, 200],
    groups=[0, 0, 0, 1, 1, 1],
    buffer_bytes=64,
    direct_bytes=32,
)
KEPT = {torch.uint8: 1, torch.int16: 2, torch.int32: 4, torch.int64: 8}
HUGE = 10**4000


def text(*messages: Any, parameters: Any = None) -> str:
    names = ["a", "b", "c", "d", "e"] if parameters is None else parameters
    return json.dumps({"parameters": names, "messages": list(messages)})


def move(number: Any, offset: Any, sizes: Any, strides: Any) -> list[Any]:
    return [number, offset, sizes, strides]


VALID = text(
    [[move(0, 0, [2, 3], [5, 1]), move(0, 6, [2], [1])], [move(1, 1, [16], [1])]],
    [[move(2, 0, [3], [2])]],
    [[move(3, 2, [], [])], [move(4, 0, [100], [1])], [move(4, 1, [32], [3])]],
)


def serve(request: Request) -> Wire:
    """Carry a request out on tensors of the sizes that the holding tells."""
    wire = Wire(Random(1))
    outgoing = outgoing_of(request, HOLDING, 0)
    sending = Sending(
        outgoing,
        wire,
        new_ring(1, 2, HOLDING.buffer_bytes + 64, CPU),
        offset=0,
        deadline=Deadline(20),
        checksums=Checksums(enabled=False),
        number=lambda message: message.ordinal,
        tell=lambda sent: None,
    )
    dtypes = {size: dtype for dtype, size in KEPT.items()}
    for place, elements in enumerate(HOLDING.elements):
        if elements:
            sending.send(place, torch.arange(elements).to(dtypes[HOLDING.itemsizes[place]]))
    sending.finish()
    assert len(wire.chunks) == len(request)
    return wire


def test_a_request_that_is_served() -> None:
    wire = serve(HOLDING.read(VALID, 0))
    assert wire.chunks[0, 0] == [bytes([0, 1, 2, 5, 6, 7, 6, 7]), bytes(b for k in range(1, 17) for b in (k, 0))]
    assert wire.chunks[0, 1] == [b"".join(k.to_bytes(4, "little") for k in (0, 2, 4))]
    assert wire.chunks[0, 2] == [(2).to_bytes(8, "little"), bytes(range(100)), bytes(range(1, 97, 3))]


def test_a_worker_that_wants_nothing() -> None:
    assert HOLDING.read('{"parameters":[],"messages":[]}', 3) == []


HOSTILE = {
    "no text": ("", "is no JSON"),
    "no JSON": ("[1,", "is no JSON"),
    "an integer of too many digits": (f'{{"parameters":[],"messages":[{"9" * 5000}]}}', "is no JSON"),
    "not a number": (VALID.replace("40", "NaN").replace("[16]", "[NaN]"), "which is no region"),
    "infinity": (VALID.replace("[16]", "[Infinity]"), "which is no region"),
    "a list": ("[]", "must have the keys parameters and messages, and no other"),
    "null": ("null", "must have the keys"),
    "a key too few": ('{"parameters":[]}', "must have the keys"),
    "a key too many": ('{"parameters":[],"messages":[],"op":"to"}', "must have the keys"),
    "parameters of another type": (text(parameters="abc"), "has str for parameters, not a list"),
    "messages of another type": ('{"parameters":[],"messages":{}}', "has dict for messages, not a list"),
    "a message of another type": (text({}), "has dict for a message, not a list"),
    "a segment of another type": (text([None]), "has NoneType for a segment, not a list"),
    "a move of another type": (text([["a"]]), "has the move 'a', not"),
    "a move too short": (text([[[0, 0, [1]]]]), "not .parameter, offset, sizes, strides."),
    "a move too long": (text([[[0, 0, [1], [1], "clone"]]]), "not .parameter, offset, sizes, strides."),
    "sizes of another type": (text([[move(0, 0, 1, [1])]]), "has int for sizes, not a list"),
    "strides of another type": (text([[move(0, 0, [1], {})]]), "has dict for strides, not a list"),
    "a foreign name": (text(parameters=["a", "rm -rf"]), "names 'rm -rf', which is not declared"),
    "a name that is none": (text(parameters=[0]), "names 0, which is not declared"),
    "a name that is a list": (text(parameters=[["a"]]), "which is not declared"),
    "half a character": ('{"parameters":["\\ud800"],"messages":[]}', "which is not declared"),
    "of another rank": (text(parameters=["elsewhere"]), "names 'elsewhere', of which that rank has nothing"),
    "no such parameter": (text([[move(5, 0, [1], [1])]]), "of no parameter or no element"),
    "a negative parameter": (text([[move(-1, 0, [1], [1])]]), "which is no region"),
    "a negative offset": (text([[move(0, -1, [1], [1])]]), "which is no region"),
    "a negative size": (text([[move(0, 0, [-3], [1])]]), "which is no region"),
    "a negative stride": (text([[move(0, 9, [3], [-1])]]), "which is no region"),
    "true": (text([[move(True, 0, [1], [1])]]), "which is no region"),
    "false": (text([[move(0, False, [1], [1])]]), "which is no region"),
    "a float": (text([[move(0, 0, [1.0], [1])]]), "which is no region"),
    "a number in words": (text([[move(0, 0, ["1"], [1])]]), "which is no region"),
    "a null stride": (text([[move(0, 0, [1], [None])]]), "which is no region"),
    "more sizes than strides": (text([[move(0, 0, [1, 1], [1])]]), "which is no region"),
    "no element": (text([[move(0, 0, [3, 0], [1, 1])]]), "of no parameter or no element"),
    "an empty message": (text([]), "has an empty message or segment, in message 0"),
    "an empty segment": (text([[move(0, 0, [1], [1])], []]), "has an empty message or segment, in message 0"),
    "an offset beyond": (text([[move(0, 10, [], [])]]), "an element past the end of 'a', of which that rank has 10"),
    "a size beyond": (text([[move(0, 1, [10], [1])]]), "'a', of which that rank has 10"),
    "a stride beyond": (text([[move(0, 0, [2, 2], [9, 1])]]), "'a', of which that rank has 10"),
    "a stride of 2**64": (text([[move(0, 0, [2], [1 << 64])]]), "'a', of which that rank has 10"),
    "a stride of 2**64 along one element": (text([[move(0, 0, [1], [1 << 64])]]), "'a', of which that rank has 10"),
    "a product that wraps": (text([[move(0, 0, [1 << 32, 1 << 32], [1 << 32, 1])]]), "'a', of which that rank has"),
    "an offset that wraps": (text([[move(0, (1 << 64) - 1, [2], [1])]]), "'a', of which that rank has"),
    "huge sizes": (text([[move(0, 0, [HUGE] * 3, [HUGE] * 3)]]), "'a', of which that rank has"),
    "huge sizes, repeated": (text([[move(0, 0, [HUGE] * 3, [0] * 3)]]), "'a', of which that rank has"),
    "many axes": (text([[move(0, 0, [1] * 65, [5] * 65)]]), "which is no region"),
    "an element often": (text([[move(0, 0, [11], [0])]]), "'a', of which that rank has 10"),
    "all of it twice": (text([[move(0, 0, [10], [1])], [move(0, 0, [1], [1])]]), "'a', of which that rank has 10"),
    "all of it in two messages": (
        text([[move(1, 0, [40], [1])]], [[move(1, 0, [40], [1])]]),
        "wants too many elements of 'b', of which that rank has 40",
    ),
    "a parameter under two numbers": (
        text([[move(0, 0, [10], [1]), move(1, 0, [10], [1])]], parameters=["a", "a"]),
        "'a', of which that rank has 10",
    ),
    "an order that goes back": (
        text([[move(1, 0, [1], [1])]], [[move(0, 0, [1], [1])]]),
        "goes back to an earlier parameter in message 1",
    ),
    "layers mixed": (text([[move(2, 0, [1], [1]), move(3, 0, [1], [1])]]), "mixes layers in message 0"),
    "an overfull message": (
        text([[move(3, 0, [6], [2])], [move(4, 0, [65], [2])]]),
        "packs 113 bytes into message 0, of 64",
    ),
    "elements across their boundaries": (
        text([[move(0, 0, [1], [1]), move(2, 0, [1], [1])]]),
        "packs message 0 so that elements lie across their boundaries",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_requests_are_refused(case: str) -> None:
    request, words = HOSTILE[case]
    with pytest.raises(MessageError, match=words) as caught:
        HOLDING.read(request, 7)
    assert "the request of worker rank 7 to trainer rank 4" in str(caught.value)
    assert caught.value.transport == "sharded_rdt"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("request_", [None, 5, {}, [VALID], b"\xff\xfe{"])
def test_what_is_no_text(request_: Any) -> None:
    with pytest.raises(MessageError, match="is no JSON"):
        HOLDING.read(request_, 0)


@pytest.mark.parametrize("place", ['{"parameters":[@],"messages":[]}', '{"parameters":["a"],"messages":[[[@]]]}', "@"])
def test_nesting_of_any_depth_is_refused(place: str) -> None:
    for depth in (*range(1, 1001, 9), *range(880, 1000), 100_000):
        with pytest.raises(MessageError) as caught:
            HOLDING.read(place.replace("@", "[" * depth + "]" * depth), 0)
        assert len(str(caught.value)) < 1000


# Anything at all

NUMBERS = st.sampled_from([0, 1, 2, 3, 9, 10, 39, 63, -1, 1 << 31, (1 << 63) - 1, 1 << 64, HUGE, True, 1.0, math.nan])
LEAVES = st.none() | NUMBERS | st.text(max_size=3) | st.sampled_from(["a", "b", "elsewhere"])
JUNK = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(["parameters", "messages"]), inner),
    max_leaves=20,
)


def check_sound(request: str) -> bool:
    """It is refused in words, or can be served within its bounds; returns whether it was believed."""
    refusal = ""
    try:
        believed = HOLDING.read(request, 0)
    except MessageError as error:
        refusal = str(error)
    if refusal:
        assert "the request of worker rank 0 to trainer rank 4" in refusal
        return False
    wire = serve(believed)
    taken = sum(len(segment) for chunk in wire.chunks.values() for segment in chunk)
    sizes = zip(HOLDING.elements, HOLDING.itemsizes, strict=True)
    assert taken <= sum(elements * itemsize for elements, itemsize in sizes)
    return True


@given(JUNK)
def test_any_json(record: Any) -> None:
    check_sound(json.dumps(record))


@given(st.text(max_size=60))
def test_any_text(request: str) -> None:
    assert not check_sound(request)


@given(st.lists(st.lists(st.lists(st.tuples(
    st.integers(0, 5), st.integers(0, 12), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=3),
).map(lambda of: [of[0], of[1], [a for a, _ in of[2]], [b for _, b in of[2]]]), max_size=3), max_size=2), max_size=3,
))  # fmt: skip
def test_regions_of_any_numbers(messages: list[Any]) -> None:
    check_sound(text(*messages))


def places_of(record: Any) -> list[tuple[Any, Any]]:
    """Every container and key at which something could be put instead."""
    if not isinstance(record, (dict, list)):
        return []
    keys = list(record) if isinstance(record, dict) else range(len(record))
    return [found for key in keys for found in [(record, key), *places_of(record[key])]]


@given(st.data())
def test_a_request_of_which_something_was_changed(data: st.DataObject) -> None:
    record = json.loads(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places_of(record)))
        change = data.draw(st.sampled_from(["replace", "delete", "repeat"]))
        if change == "replace":
            container[key] = data.draw(JUNK)
        elif change == "delete":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
    check_sound(json.dumps(record))


@given(st.randoms(use_true_random=False))
def test_the_requests_of_others_are_believed_only_where_they_fit(random: Random) -> None:
    """What a real worker asks of one rank, asked of another one."""
    pulls = Pulls.random(random)
    asked = pulls.ask(0)
    for rank, request in enumerate(asked.requests):
        pulls.holding(rank).read(request, 0)
        for other in range(pulls.scene.trainers):
            holding = pulls.holding(other)
            try:
                believed = holding.read(request, 0)
            except MessageError:
                continue
            assert all(holding.elements[move.place] for message in believed for moves in message for move in moves)
