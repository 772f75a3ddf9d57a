"""What `verify` makes of a checkpoint's digests and those that ranks answer."""

from __future__ import annotations

from weightwire_cli.comparison import Digest, Finding, compare
from weightwire_cli.servers import Stored, by_place

FIRST, SECOND = "dp0:pp0:pcp0:tp0", "dp0:pp0:pcp0:tp1"
CHECKPOINT = {
    "embed": Digest("E", "float32", (4, 2)),
    "layer.weight": Digest("W", "float32", (2, 2)),
    "norm": Digest("N", "float32", (2,)),
}
EQUAL = {"embed": "E", "layer.weight": "W", "norm": "N"}


def found(
    held: dict[str, dict[str, str]],
    parameters: dict[str, dict[str, Stored]] | None = None,
    checkpoint: dict[str, Digest] = CHECKPOINT,
    partial: bool = False,
) -> list[tuple[str, str, str]]:
    findings: list[Finding] = compare(checkpoint, held, parameters, partial=partial)
    return [(one.place, one.name, one.kind) for one in findings]


def test_equal_on_every_rank() -> None:
    assert found({FIRST: EQUAL, SECOND: EQUAL}) == []


def test_missing_extra_differing() -> None:
    held = {FIRST: {"embed": "E", "layer.weight": "other", "seen": "S"}}
    expected = [
        (FIRST, "layer.weight", "differs"),
        ("dp0", "norm", "missing"),
        (FIRST, "seen", "extra"),
    ]
    assert found(held) == expected
    assert found(held, partial=True) == expected[:2]


def test_pipeline_stages_hold_a_part_each() -> None:
    held = {"dp0:pp0:pcp0:tp0": {"embed": "E"}, "dp0:pp1:pcp0:tp0": {"layer.weight": "W", "norm": "N"}}
    assert found(held) == []
    assert found({**held, "dp1:pp0:pcp0:tp0": {"embed": "E", "layer.weight": "W"}}) == [("dp1", "norm", "missing")]


def test_shards_are_not_comparable() -> None:
    held = {FIRST: {**EQUAL, "layer.weight": "W0"}, SECOND: {**EQUAL, "layer.weight": "W1"}}
    expected = [(FIRST, "layer.weight", "not comparable"), (SECOND, "layer.weight", "not comparable")]
    assert found(held) == expected
    shard = {"layer.weight": Stored("float32", (2, 2), (1, 2))}
    assert found(held, {FIRST: shard, SECOND: shard}) == expected
    whole = {"layer.weight": Stored("float32", (2, 2), (2, 2))}
    assert {kind for _, _, kind in found(held, {FIRST: whole, SECOND: whole})} == {"differs"}


def test_one_of_two_replicas_of_a_parameter_differs() -> None:
    held = {FIRST: EQUAL, SECOND: {**EQUAL, "norm": "other"}}
    assert found(held) == [(SECOND, "norm", "differs")]


def test_another_dtype_is_not_comparable() -> None:
    held = {FIRST: {**EQUAL, "norm": "cast"}}
    stored = {"norm": Stored("bfloat16", (2,), (2,))}
    assert found(held, {FIRST: stored}) == [(FIRST, "norm", "not comparable")]


def test_tied_parameters() -> None:
    both = {**CHECKPOINT, "lm_head": Digest("E", "float32", (4, 2))}
    assert found({FIRST: EQUAL}, checkpoint=both) == []
    other_name = {"lm_head": "E", "layer.weight": "W", "norm": "N"}
    assert found({FIRST: other_name}) == [("dp0", "embed", "missing"), (FIRST, "lm_head", "extra")]
    told = {FIRST: {"lm_head": Stored("float32", (4, 2), (4, 2), ("embed", "lm_head"))}}
    assert found({FIRST: other_name}, told) == []
    assert found({FIRST: {**other_name, "lm_head": "other"}}, told) == [(FIRST, "embed", "differs")]


def test_keys_with_colons() -> None:
    assert by_place({f"{FIRST}:a:b": "S"}, "http://h") == {FIRST: {"a:b": "S"}}
