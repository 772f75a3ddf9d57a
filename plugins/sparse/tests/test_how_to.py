"""What docs/how-to/send-only-what-changed.md and the reference show is run as it stands."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.test_how_to_one_host import run_script
from tests.test_readme import ROOT
from weightwire.messages import TrainerInitInfo
from weightwire.testing.fixtures import BorrowRanks
from weightwire_sparse import SparseNCCLTrainerInitInfo

PAGE = ROOT / "docs" / "how-to" / "send-only-what-changed.md"
REFERENCE = ROOT / "docs" / "reference" / "sparse.md"
PROGRAMS = re.findall(r"```python\n# (\w+\.py)\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE.read_text(), re.DOTALL)


def shape(text: str) -> str:
    """Text without its figures, which depend on the machine's arithmetic."""
    return re.sub(r"\d[\d.]*%?", "#", text)


def test_the_programs(ranks: BorrowRanks, tmp_path: Path) -> None:
    (user,) = ranks(1)
    assert [name for name, _, _ in PROGRAMS] == ["how_much.py", "sync.py", "overlap.py", "patches.py"]
    for name, text, expected in PROGRAMS:
        (tmp_path / name).write_text(text)
        said = user.call(run_script, str(tmp_path), name)
        assert shape(said) == shape(expected or "step-0 dense\nstep-1 delta\nstep-2 delta\n"), name


def test_init_infos_that_are_shown_can_be_made() -> None:
    made = re.findall(r"^SparseNCCLTrainerInitInfo\(.+\)$", PAGE.read_text(), re.MULTILINE)
    assert len(made) == 5
    for text in made:
        assert isinstance(eval(text), SparseNCCLTrainerInitInfo)


SHARED = {field.name for field in dataclasses.fields(TrainerInitInfo)}
SHARED |= {"master_address", "master_port", "world_size"}


@pytest.mark.parametrize(
    "field",
    [pytest.param(one, id=one.name) for one in dataclasses.fields(SparseNCCLTrainerInitInfo) if one.name not in SHARED],
)
def test_the_reference_has_each_field(field: dataclasses.Field[object]) -> None:
    (row,) = re.findall(rf"^\| (.*`{field.name}`.*?) \| (.*?) \|", REFERENCE.read_text(), re.MULTILINE)
    assert isinstance(field.default, str | int | float | None)
    known = {16 << 20: "16 MiB"}
    default = known.get(field.default, repr(field.default)) if isinstance(field.default, int) else repr(field.default)
    assert default.replace("'", '"') in row[1]
