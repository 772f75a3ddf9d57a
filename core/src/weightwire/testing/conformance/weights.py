"""Groups bytes and order: what arrives is what was sent, bit for bit, each under its own name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from weightwire.testing.conformance.check import Check
from weightwire.testing.conformance.payloads import (
    Payload,
    every_dtype,
    larger_than,
    narrow_before_wide,
    odd_views,
    tiny,
    twins,
)
from weightwire.testing.conformance.stage import Stage


def _arrives(stage: Stage, payload: Callable[[], Payload], *, whole: bool = False) -> None:
    """Two rounds: the second one goes the way that repeated rounds go."""
    scene = stage.scene(payload(), whole=whole)
    scene.push(1)
    scene.push(2)


def _larger_than_every_buffer(stage: Stage) -> None:
    _arrives(stage, partial(larger_than, stage.subject.buffer_bytes))


def _all_offered_at_once(stage: Stage) -> None:
    _arrives(stage, twins, whole=True)


def _after_one_another(stage: Stage) -> None:
    """Ten rounds in a row, so that buffers are used again while they are still warm."""
    scene = stage.scene(twins(), whole=True)
    for version in range(1, 11):
        scene.push(version)


CHECKS: Final = (
    Check("bytes", "every-dtype", partial(_arrives, payload=every_dtype)),
    Check("bytes", "odd-sized-narrow-before-wide", partial(_arrives, payload=narrow_before_wide)),
    Check("bytes", "views-empty-scalar-shared-tied", partial(_arrives, payload=odd_views)),
    Check("bytes", "thousands-tiny", partial(_arrives, payload=partial(tiny, 2000))),
    Check("bytes", "twenty-thousand-tiny", partial(_arrives, payload=partial(tiny, 20_000)), expensive=True),
    Check("bytes", "larger-than-every-buffer", _larger_than_every_buffer),
    Check("order", "equal-shapes", partial(_arrives, payload=twins)),
    Check("order", "equal-shapes-offered-at-once", _all_offered_at_once),
    Check("order", "ten-rounds-in-a-row", _after_one_another),
)
