"""The kit itself: whatever is broken in a transport is found, and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.tests.broken_transports import TRAINERS, WORKERS, register
from weightwire.testing import Nonconforming, TransportUnderTest
from weightwire.testing.conformance.catalogue import CHECKS, in_group
from weightwire.testing.conformance.check import GROUPS, Check
from weightwire.testing.conformance.stage import Stage
from weightwire.testing.conformance.subject import CAPABILITIES
from weightwire.testing.fixtures import BorrowRanks

FOUND = {
    "loses_a_tensor": ("bytes/every-dtype", r"'layer\.of_.*' holds the poison .*: its bytes never came"),
    "swaps_two": ("order/equal-shapes", r"'twin_.' holds the bytes of 'twin_.': swapped"),
    "ignores_the_deadline": (
        "failure/deadline-trainer-held",
        r"worker rank 0 is still receiving .* ignores its deadline",
    ),
    "sender_ignores_the_deadline": ("failure/deadline-only-worker-held", r"which it ignores.* did not end within"),
    "leaks_a_descriptor": ("leak/flat-over-100-rounds", r"worker rank 0 leaks: .* descriptors went .*/dev/null"),
    "commits_early": ("failure/nothing-live-before-the-vote", r"worker rank \d before the vote: it serves the new"),
    "tears_on_abort": ("failure/error-at-worker-received", r"worker rank 1 .*its weights are torn: \d old .* \d new"),
    "returns_before_the_bytes": ("bytes/every-dtype", r"when send_weights returned; they came later"),
    "wrong_dtype": ("order/equal-shapes", r"'.*twin_.' of torch.float32 was converted to torch.bfloat16"),
    "stale_buffer": ("versions/sent-again", r"'mask' holds its bytes of update 1: stale"),
    "swallows_the_error": ("failure/error-in-the-source", r"the error was swallowed"),
}
"""Where the kit has to find each of them, and what it has to say."""

pytestmark = pytest.mark.thorough


def find(name: str) -> Check:
    (check,) = [check for check in CHECKS if f"{check.group}/{check.name}" == name]
    return check


def stage_of(backend: str, root: Path, ranks: BorrowRanks, *capabilities: str) -> Stage:
    options = {"root": str(root), "shard_bytes": 1 << 16}
    declared = frozenset({"full", "cpu", *capabilities})
    subject = TransportUnderTest(
        backend, options=options, buffer_bytes=1 << 16, register=register, capabilities=declared
    )
    return Stage(subject, ranks)


@pytest.mark.parametrize("backend", FOUND)
def test_what_is_broken_is_named(backend: str, tmp_path: Path, ranks: BorrowRanks) -> None:
    name, words = FOUND[backend]
    with pytest.raises(Nonconforming, match=words):
        find(name).run(stage_of(backend, tmp_path, ranks))


@pytest.mark.parametrize("name", ["bytes/every-dtype", "order/equal-shapes", "failure/error-in-the-source"])
def test_what_is_whole_passes(name: str, tmp_path: Path, ranks: BorrowRanks) -> None:
    find(name).run(stage_of("whole", tmp_path, ranks))


def test_a_capability_that_is_not_there_is_a_failure(tmp_path: Path, ranks: BorrowRanks) -> None:
    check = find("fleet/2-to-2-owned-in-turn")
    honest = stage_of("one_sender_only", tmp_path, ranks)
    assert "declares no capability 'multi_sender'" in check.skipped(honest, everything=True)
    with pytest.raises(Nonconforming, match="only trainer rank 0 sends"):
        check.run(stage_of("one_sender_only", tmp_path, ranks, "multi_sender"))


def test_what_is_not_declared_has_to_be_refused(tmp_path: Path, ranks: BorrowRanks) -> None:
    check = find("fleet/other-senders-are-refused")
    check.run(stage_of("one_sender_only", tmp_path, ranks))
    with pytest.raises(Nonconforming, match="declare it, or refuse it"):
        check.run(stage_of("other_senders_lost", tmp_path, ranks))


def test_a_capability_that_nobody_knows(tmp_path: Path, ranks: BorrowRanks) -> None:
    check = find("contract/capabilities")
    check.run(stage_of("whole", tmp_path, ranks, "multi_sender", "whole.compressed"))
    with pytest.raises(Nonconforming, match="'teleport'"):
        check.run(stage_of("whole", tmp_path, ranks, "teleport"))


def test_every_broken_one_is_looked_for() -> None:
    assert {*TRAINERS, *WORKERS} - {"one_sender_only", "other_senders_lost"} == set(FOUND)
    assert {check.group for check in CHECKS} == set(GROUPS)
    assert len({(check.group, check.name) for check in CHECKS}) == len(CHECKS)


def test_every_check_and_capability_is_in_the_reference() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "testing.md").read_text()
    (table,) = [part for part in page.split("\n\n") if part.startswith("| group |")]
    rows = {row.split(" | ")[0].strip("| "): row.split(" | ")[2].strip("| ") for row in table.splitlines()[2:]}
    marked = {
        group: ", ".join(f"`{check.name}`" + r"\*" * check.expensive for check in in_group(group)) for group in GROUPS
    }
    assert rows == marked
    assert not [word for word in CAPABILITIES if f"| `{word}` |" not in page]
