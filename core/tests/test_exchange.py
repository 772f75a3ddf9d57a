from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import DeadlineExceeded, HandshakeError, TransferError
from weightwire.exchange import Outcome, member_label, reduce
from weightwire.frames import decode, encode


def label(rank: int) -> str:
    return member_label(rank, 2)


def outcome_of(posts: dict[int, dict[str, Any]]) -> Outcome:
    whole = {rank: {"error": None, "agree": {}, **post} for rank, post in posts.items()}
    return Outcome.from_frame(decode(encode(reduce(whole, label))), phase="hello", trainers=2, own=None)


_AGREES = st.dictionaries(
    st.integers(0, 9),
    st.dictionaries(st.sampled_from(["wire", "metadata", "dtype"]), st.sampled_from([1, "1", None, [1], {"a": 1}])),
    min_size=1,
)


@given(_AGREES)
def test_there_is_one_sentence_for_each_key_with_two_values(agrees: dict[int, dict[str, Any]]) -> None:
    outcome = outcome_of({rank: {"agree": agree} for rank, agree in agrees.items()})
    values: dict[str, set[str]] = {}
    for agree in agrees.values():
        for key, value in agree.items():
            values.setdefault(key, set()).add(json.dumps(value))
    differing = {key for key, found in values.items() if len(found) > 1}
    assert {sentence.split(":")[0] for sentence in outcome.disagreements} == differing
    assert outcome.unanimous == (not differing)


@given(st.integers(0, 9), st.integers(3, 10))
def test_the_odd_one_is_named_and_the_majority_is_cut_short(odd: int, world: int) -> None:
    odd = odd % world
    agrees = {rank: {"agree": {"key": "x" * 100 if rank == odd else "usual"}} for rank in range(world)}
    (sentence,) = outcome_of(agrees).disagreements
    assert sentence.startswith(f'key: {label(odd)} has "{"x" * 58}…, but ')
    assert sentence.endswith(' has "usual"')
    assert (f"and {world - 5} more" in sentence) == (world > 5)


def test_order_of_keys_is_no_difference() -> None:
    assert outcome_of({0: {"agree": {"a": {"x": 1, "y": 2}}}, 1: {"agree": {"a": {"y": 2, "x": 1}}}}).unanimous


def test_many_failures_stay_small() -> None:
    error = TransferError("x" * 5000).to_json()
    outcome = outcome_of({rank: {"error": error} for rank in range(500)})
    assert len(outcome.errors) == 500
    assert [len(failed.error.message) for failed in outcome.errors[6:10]] == [2000, 2000, 100, 100]
    assert len(encode(reduce({rank: {"error": error, "agree": {}} for rank in range(500)}, label))) < 200_000


def test_an_error_is_named_by_who_posted_it_and_goes_before_a_disagreement() -> None:
    errors = {2: DeadlineExceeded("too late", rank="rank 17").to_json(), 1: HandshakeError("odd").to_json()}
    posts: dict[int, dict[str, Any]] = {2: {"agree": {"a": 1}}, 1: {"agree": {"a": 2}}, 0: {}}
    for rank, error in errors.items():
        posts[rank]["error"] = error
    outcome = outcome_of(posts)
    assert [(failed.rank, str(failed.error)) for failed in outcome.errors] == [
        (2, "[worker rank 0] too late"),
        (1, "[trainer rank 1] odd"),
    ]
    assert outcome.disagreements
