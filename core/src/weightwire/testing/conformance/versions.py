"""Group versions: many updates, partial ones, skipped, repeated and stale ones."""

from __future__ import annotations

from typing import Any, Final

from weightwire.clients.fanout import FanoutClient
from weightwire.errors import HandshakeError, OrderError
from weightwire.messages import WeightTransferUpdatePayload
from weightwire.testing.conformance import ranks as remote
from weightwire.testing.conformance.check import Check
from weightwire.testing.conformance.judging import Nonconforming
from weightwire.testing.conformance.payloads import Item, small
from weightwire.testing.conformance.stage import Stage, nonconforming

_MANY = 30


def _many_updates(stage: Stage) -> None:
    """Each with its label and its revision."""
    scene = stage.scene(small(), servers=(1, 1), whole=True)
    for version in range(1, _MANY + 1):
        report = scene.push(version, label=f"step-{version}")
        for rank in scene.workers:
            info = rank.call(remote.info)
            told = (info["weight_version"], info["revision"])
            if told != (f"step-{version}", report["revision"]):
                raise Nonconforming(f"{scene.label(rank)} says {told} after step-{version}, {report['revision']}")
    if report["revision"]["number"] != _MANY:
        raise Nonconforming(f"{_MANY} updates made revision {report['revision']['number']}")


def _partial(stage: Stage) -> None:
    """What is not in an update stays as it is."""
    model = (*small(), Item("other.weight", (40, 3)), Item("other.bias", (7,)))
    sent, rest = (model[6], model[0], model[3]), (*model[1:3], *model[4:6], model[7])
    scene = stage.scene(sent, holds=model, scope="partial", servers=(1, 1))
    for version in (1, 2):
        scene.push(version)
        for rank in scene.workers:
            if found := rank.call(remote.mixed, rest, 0, version):
                raise Nonconforming(f"{scene.label(rank)} in what a partial update did not bring: {found}")


def _skipped(stage: Stage) -> None:
    """A server that missed updates gets the newest one whole."""
    scene = stage.scene(small(), servers=(1, 1))
    first, second = scene.workers
    scene.push(1)
    scene.reopen([first])
    scene.push(2, to=[first])
    scene.push(3, to=[first])
    if found := second.call(remote.mixed, scene.payload, 1, 3):
        raise Nonconforming(f"worker rank 1, which takes no part: {found}")
    scene.reopen()
    scene.push(5)


def _sent_again(stage: Stage) -> None:
    """The same weights once more are an update like any other, and so is going back."""
    scene = stage.scene(small())
    for version in (1, 1, 2, 1):
        scene.push(version)


class Repeating(FanoutClient):
    """Makes every call of an update twice, as after an answer that was lost."""

    def update_weights(self, update_info: WeightTransferUpdatePayload, **keywords: Any) -> None:
        """Twice."""
        for _ in range(2):
            super().update_weights(update_info, **keywords)

    def finish_weight_update(self, weight_version: str | None = None, **keywords: Any) -> None:
        """Twice."""
        for _ in range(2):
            super().finish_weight_update(weight_version, **keywords)


def _calls_repeated(stage: Stage) -> None:
    scene = stage.scene(small(), servers=(1, 1), behind=Repeating)
    for version in (1, 2):
        scene.push(version)


class StaleBase(FanoutClient):
    """Has updates stand on a revision that nobody holds."""

    def update_weights(self, update_info: WeightTransferUpdatePayload, **keywords: Any) -> None:
        """Add the base."""
        assert isinstance(update_info, dict)
        super().update_weights({**update_info, "base": {"lineage": "ab" * 16, "number": 7}}, **keywords)


def _stale_base(stage: Stage) -> None:
    scene = stage.scene(small(), servers=(1, 1), behind=StaleBase)
    (sending,) = scene.send(1)
    error = scene.error_of(sending, "with an update on a revision that no worker holds")
    if not isinstance(error, HandshakeError):
        raise Nonconforming(f"a stale update raised no HandshakeError but {type(error).__name__}: {error}")
    scene.check_old(scene.workers, 1, after="after a stale update")


def _superseded(stage: Stage) -> None:
    """Of two trainers the one that took over sends, and the other one does not get through."""
    scene = stage.scene(small(), servers=(1, 1), takeover=True)
    scene.push(1)
    older = scene.trainers[0]
    scene.replace_trainers(stage.lend(1))
    scene.push(2)
    refused = older.start(_send_without_takeover, 3)
    error = scene.error_of(refused, "from a trainer that was superseded")
    if not isinstance(error, OrderError):
        raise Nonconforming(f"a superseded trainer's update raised no OrderError but {type(error).__name__}: {error}")
    scene.check_old(scene.workers, 3, after="after a superseded trainer's update")
    with nonconforming("the update of the trainer that took over"):
        scene.push(4)


def _send_without_takeover(state: remote.State, version: int) -> dict[str, Any]:
    state["trainer"].init_info.takeover = False
    return remote.send(state, version)


CHECKS: Final = (
    Check("versions", "many-updates", _many_updates),
    Check("versions", "partial", _partial),
    Check("versions", "skipped", _skipped),
    Check("versions", "sent-again", _sent_again),
    Check("versions", "calls-repeated", _calls_repeated),
    Check("versions", "stale-base", _stale_base),
    Check("versions", "superseded", _superseded),
)
