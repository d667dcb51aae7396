"""docs/config.md says what the code says.

Why it matters: a page of settings that has drifted from the program is worse than none.
Not covered: whether a meaning is well put.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from launch.schema import fields
from megamoe.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("config_docs", ROOT / "tools" / "config_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_code_says(tool):
    assert (ROOT / "docs" / "config.md").read_text() == tool.render(), "run: python tools/config_docs.py"


def test_every_key_is_on_the_page():
    page = (ROOT / "docs" / "config.md").read_text()
    assert [key for key, hint in fields().items() if f"`{key}`" not in page] == []


def test_a_key_without_meaning_is_refused(tool):
    @dataclasses.dataclass
    class Section:
        """
        Attributes:
            known: it is.
        """

        known: int = 1
        forgotten: int = 2

    Section.__annotations__ = {"known": int, "forgotten": int}
    with pytest.raises(UserError, match=r"x\.forgotten: has no meaning"):
        tool._section("x", Section, {"known": 1, "forgotten": 2})


def test_a_meaning_without_key_is_refused(tool, monkeypatch):
    monkeypatch.setitem(tool.MEANINGS, "optim.gone", "something")
    with pytest.raises(UserError, match=r"optim\.gone"):
        tool.render()
