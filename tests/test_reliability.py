"""docs/reliability.md says what the records say, of checks that there are."""

from __future__ import annotations

import json
import re

import properties
import reliability


def test_the_page_is_that_of_the_records():
    text = reliability.PAGE.read_text()
    assert reliability.page(text) == text, "run python tests/reliability.py"


def test_the_page_names_every_property_and_every_command():
    text = reliability.PAGE.read_text()
    assert all(f"`{name}`" in text for name in properties.PROPERTIES)
    makefile = (reliability.ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)", text):
        assert re.search(rf"^(\S+ )*{target}( \S+)*:", makefile, re.MULTILINE), target


def test_records_found_nothing_that_is_open():
    """A run with failures is no record: what it found is mended, with a test of its own, and run again."""
    for path in reliability.RECORDS.glob("*.json"):
        record = json.loads(path.read_text())
        environments = record.get("environments", [record])
        for one in environments:
            assert not any(one.get(word) for word in ("failures", "errors", "failed")), path.name


def test_a_stale_block_is_seen(tmp_path):
    text = reliability.PAGE.read_text()
    changed = text.replace("<!-- reliability:fuzz -->\n", "<!-- reliability:fuzz -->\n| 7 |\n")
    assert changed != text and reliability.page(changed) == text
