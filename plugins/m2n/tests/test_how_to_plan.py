"""The programs and the command of docs/how-to/plan-a-reshard.md, run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.test_how_to_one_host import run_script
from tests.test_how_to_push import run
from tests.test_readme import ROOT, snippets
from weightwire.testing.fixtures import BorrowRanks, pool, ranks
from weightwire_m2n import messages

__all__ = ["pool", "ranks"]

PAGE = ROOT / "docs" / "how-to" / "plan-a-reshard.md"


def test_the_page(ranks: BorrowRanks, tmp_path: Path) -> None:
    (user,) = ranks(1)
    programs = snippets(PAGE)
    assert list(programs) == ["trainers.py", "workers.py"]
    for name, code in programs.items():
        (tmp_path / name).write_text(code)
        assert user.call(run_script, str(tmp_path), name) == ""
    page = PAGE.read_text()
    (line,) = re.findall(r"^weightwire (plan .*)$", page, re.MULTILINE)
    (expected,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    result, said = user.call(run, str(tmp_path), shlex.split(line))
    took = re.compile(r"planned in .*")
    assert (result, took.sub("", said)) == (0, took.sub("", expected))
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_the_setting_that_is_shown() -> None:
    (line,) = re.findall(r"^M2NTrainerInitInfo\(.*\)$", PAGE.read_text(), re.MULTILINE)
    assert eval(line, vars(messages)).layouts == "layouts"
