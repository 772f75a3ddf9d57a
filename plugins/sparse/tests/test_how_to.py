"""What docs/how-to/send-only-what-changed.md and the reference show is run as it stands."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tests.test_how_to_one_host import run_script
from tests.test_readme import ROOT
from weightwire.messages import TrainerInitInfo
from weightwire.testing.fixtures import BorrowRanks
from weightwire_sparse import SparseNCCLTrainerInitInfo
from weightwire_sparse.messages import PIECE_BYTES

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


def test_the_reference_has_each_field_and_its_default() -> None:
    section = REFERENCE.read_text().partition("\n## `SparseNCCLTrainerInitInfo`\n")[2].partition("\n## ")[0]
    shared = {field.name for field in dataclasses.fields(TrainerInitInfo)}
    shared |= {"master_address", "master_port", "world_size"}
    for field in dataclasses.fields(SparseNCCLTrainerInitInfo):
        if field.name not in shared:
            (default,) = re.findall(rf"^\| .*`{field.name}`.*? \| (.*?) \|", section, re.MULTILINE)
            known: dict[object, str] = {PIECE_BYTES: "16 MiB"}
            assert known.get(field.default, str(field.default)) in default
