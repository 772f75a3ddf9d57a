"""Messages refuse what JSON would let through, and say which key it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from weightwire.errors import MessageError
from weightwire.messages import (
    LinkInfo,
    Message,
    ParallelConfig,
    TrainerInitInfo,
    WeightTransferUpdateInfo,
    pick_update,
)

LINK: dict[str, Any] = {
    "api": [1, 0],
    "wire": 1,
    "backend": "nccl",
    "trainer": "a" * 32,
    "epoch": 0,
    "secret": "00" * 16,
    "address": "127.0.0.1",
    "port": 5000,
    "senders": [0],
    "trainers": 1,
    "workers": 2,
    "metadata": [],
}


@dataclass(kw_only=True)
class Example(Message):
    count: int
    ratio: float = 1.0
    names: list[str] | None = None
    table: dict[str, int] | None = None


def test_a_valid_record_is_parsed_and_written_back_without_nones() -> None:
    parsed = Example.parse({"count": 3, "names": ["a"]}, what="example")
    assert parsed == Example(count=3, names=["a"])
    assert parsed.to_json() == {"count": 3, "ratio": 1.0, "names": ["a"]}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({}, "Invalid example: missing key 'count'"),
        ({"count": 1, "colour": 2}, "unknown key 'colour'"),
        ({"count": "1"}, "Example.count must be int, got str"),
        ({"count": True}, "Example.count must be int, got bool"),
        ({"count": 1.0}, "Example.count must be int, got float"),
        ({"count": 1, "names": [1]}, "Example.names must be"),
        ({"count": 1, "table": {"a": "b"}}, "Example.table must be"),
        ({"count": 1, "ratio": "fast"}, "Example.ratio must be float"),
        ([1], "expected an object, got list"),
    ],
)
def test_a_wrong_record_is_refused_by_name(record: Any, words: str) -> None:
    with pytest.raises(MessageError, match="Invalid example") as caught:
        Example.parse(record, what="example")
    assert words in str(caught.value)


def test_a_mistyped_field_is_refused_in_the_constructor_too() -> None:
    with pytest.raises(MessageError, match=r"Example.count must be int, got NoneType"):
        Example(count=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"secret": "00"}, "16 bytes in hex"),
        ({"secret": "zz" * 16}, "16 bytes in hex"),
        ({"port": 0}, "port must be between"),
        ({"worker_offset": 2}, "do not describe a fleet"),
        ({"workers": 0}, "do not describe a fleet"),
        ({"metadata": {}}, "LinkInfo.metadata must be"),
    ],
)
def test_a_link_that_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    assert LinkInfo.parse(LINK, what="weightwire").workers == 2
    with pytest.raises(MessageError, match=words):
        LinkInfo.parse({**LINK, **change}, what="weightwire")


def test_an_update_knows_two_scopes() -> None:
    assert WeightTransferUpdateInfo().scope == "full"
    with pytest.raises(MessageError, match="scope must be"):
        WeightTransferUpdateInfo.parse({"scope": "most"}, what="update_info")


def test_a_trainer_init_info_declares_its_backend() -> None:
    with pytest.raises(TypeError, match="Nameless must set the class variable backend"):

        class Nameless(TrainerInitInfo):
            pass

    class Named(TrainerInitInfo):
        backend = "named"

    assert Named().rank == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank": -1}, "must not be negative"),
        ({"rank": 2, "num_trainer_ranks": 2}, "outside 2 trainer ranks"),
        ({"master_port": 70000}, "between 0 and 65535"),
        ({"timeout": 0}, "must be positive"),
        ({"world_size": 1}, "at least 2"),
    ],
)
def test_a_trainer_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    class Some(TrainerInitInfo):
        backend = "some"

    with pytest.raises(MessageError, match=words):
        Some(**fields)


def test_a_worker_counts_through_the_replicas() -> None:
    parallel = ParallelConfig(rank=1, world_size=4, data_parallel_index=2, data_parallel_size=3)
    assert parallel.worker_index == 9
    assert parallel.world_size_across_dp == 12


def test_a_list_of_updates_has_one_element_per_worker() -> None:
    assert pick_update([{"a": 0}, {"a": 1}], index=1, count=2) == {"a": 1}
    assert pick_update({"a": 0}, index=1, count=2) == {"a": 0}
    with pytest.raises(MessageError, match="lists 1 elements for 2 workers"):
        pick_update([{"a": 0}], index=0, count=2)
    with pytest.raises(MessageError, match="must be an object, got str"):
        pick_update("a", index=0, count=1)  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="must be an object, got int"):
        pick_update([1], index=0, count=1)  # type: ignore[list-item]
