"""What an exchange tells its members: who failed, and where they disagree."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

from weightwire.errors import HandshakeError, PayloadTooLarge, PeerFailed, WeightwireError, error_from_json
from weightwire.frames import Frame, encode

JSON: TypeAlias = Any
"""Whatever `json.dumps` takes."""

_FULL_ERRORS: Final = 8
_FULL_LENGTH: Final = 2000
_SHORT_LENGTH: Final = 100
_VALUE_LENGTH: Final = 60
_NAMES: Final = 4


def member_label(rank: int, trainers: int) -> str:
    """`"trainer rank 0"`, `"worker rank 0"`: members are the trainer ranks, then the workers from 0."""
    return f"trainer rank {rank}" if rank < trainers else f"worker rank {rank - trainers}"


@dataclass(frozen=True, slots=True)
class RankError:
    """The error that one member posted.

    Attributes:
        rank: Its member rank.
        label: Its name in words.
        error: In its own words; `error.rank` is the label.
    """

    rank: int
    label: str
    error: WeightwireError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all members of one exchange are told.

    Attributes:
        phase: Which exchange.
        errors: One for each member that posted an error, in order of arrival.
        disagreements: A sentence for each key of `agree` on which those that gave it differ.
        payloads: Member rank to payload, if this member asked for them.
        own: The error that this member posted.
    """

    phase: str
    errors: tuple[RankError, ...]
    disagreements: tuple[str, ...]
    payloads: dict[int, JSON]
    own: WeightwireError | None = None

    @property
    def unanimous(self) -> bool:
        """Nobody failed, and all agree."""
        return not self.errors and not self.disagreements

    def raise_failed(self) -> None:
        """Raise what was wrong, if anything was.

        Raises:
            WeightwireError: This member's own error, as it was posted; else the first of another member, in its
                words and with its name: of its own class if that is a ValueError, else `PeerFailed`.
            HandshakeError: Nobody failed, and members disagree.
        """
        if self.own is not None:
            raise self.own
        if self.errors:
            _raise_for(self.errors[0])
        if self.disagreements:
            raise HandshakeError(f"{self.phase}: {'; '.join(self.disagreements)}")

    @classmethod
    def from_frame(cls, frame: Frame, *, phase: str, trainers: int, own: WeightwireError | None) -> Outcome:
        """Read what `reduce` wrote."""
        errors = []
        for rank, record in frame["errors"]:
            label = member_label(rank, trainers)
            errors.append(RankError(rank, label, error_from_json({**record, "rank": label})))
        payloads = {int(rank): payload for rank, payload in frame["payloads"].items()}
        return cls(phase, tuple(errors), tuple(frame["disagreements"]), payloads, own)


def _raise_for(failed: RankError) -> NoReturn:
    if isinstance(failed.error, ValueError):
        raise failed.error
    raise PeerFailed.from_json(failed.error.to_json())


def posting(
    phase: str,
    *,
    agree: Mapping[str, JSON],
    payload: JSON,
    error: WeightwireError | None,
    gather: bool,
    waits: bool,
) -> tuple[bytes, WeightwireError | None]:
    """The frame with which a member takes part, and the error in it: what is too large to send becomes one."""
    post = {"type": "post", "id": phase, "phase": phase, "gather": gather, "waits": waits}
    try:
        return encode({**post, "agree": agree, "payload": payload, "error": error and error.to_json()}), error
    except PayloadTooLarge as too_large:
        error = error or PayloadTooLarge(f"{phase}: {too_large.message}")
        return encode({**post, "agree": {}, "payload": None, "error": error.to_json()}), error


def reduce(posts: Mapping[int, Frame], label: Callable[[int], str]) -> Frame:
    """The outcome of an exchange, without payloads.

    Its size grows with the number of members that failed or differ, not with what they posted: from the ninth
    error on, words are cut to 100 characters.

    Args:
        posts: Member rank to what it posted, in order of arrival.
        label: Member rank to name.
    """
    errors: list[tuple[int, JSON]] = []
    for rank, post in posts.items():
        if post["error"] is not None:
            length = _FULL_LENGTH if len(errors) < _FULL_ERRORS else _SHORT_LENGTH
            errors.append((rank, {**post["error"], "message": _cut(post["error"]["message"], length)}))
    agrees = {rank: posts[rank]["agree"] for rank in sorted(posts)}
    return {"errors": errors, "disagreements": _disagreements(agrees, label), "payloads": {}}


def _disagreements(agrees: Mapping[int, Mapping[str, JSON]], label: Callable[[int], str]) -> list[str]:
    """A sentence per key: who is odd against the majority; in a tie, against the lowest rank among the largest."""
    keys = dict.fromkeys(key for agree in agrees.values() for key in agree)
    sentences = []
    for key in keys:
        holders: dict[str, list[int]] = {}
        for rank, agree in agrees.items():
            if key in agree:
                holders.setdefault(json.dumps(agree[key], sort_keys=True), []).append(rank)
        if len(holders) == 1:
            continue
        usual = max(holders, key=lambda text: (len(holders[text]), -holders[text][0]))
        odd = [_has(text, ranks, label) for text, ranks in holders.items() if text != usual]
        sentences.append(f"{key}: {_names(odd)}, but {_has(usual, holders[usual], label)}")
    return sentences


def _has(text: str, ranks: Iterable[int], label: Callable[[int], str]) -> str:
    return f"{_names([label(rank) for rank in ranks])} has {_cut(text, _VALUE_LENGTH)}"


def _names(names: list[str]) -> str:
    """The first few of `names`, and how many more there are."""
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more} more" if more > 0 else "")


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
