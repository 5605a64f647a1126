"""The version stands in pyproject.toml alone; this says whether the changelog and a release's tag agree with it.

python .ci/version.py            # prints it; fails where the changelog's newest section is another's
python .ci/version.py v0.1.0     # as a release's tag: the section must also be dated
"""

from __future__ import annotations

import datetime
import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).parent.parent
SECTION = re.compile(r"^## \[([^\]]+)\](?: - (.*))?$", re.MULTILINE)


def check(version: str, changelog: str, tag: str | None) -> list[str]:
    """What is wrong."""
    sections = SECTION.findall(changelog)
    if not sections:
        return ["CHANGELOG.md has no section '## [version] - date'"]
    newest, date = sections[0]
    wrong = []
    if newest != version:
        wrong.append(f"CHANGELOG.md's newest section is {newest}, pyproject.toml says {version}")
    if date != "unreleased":
        try:
            datetime.date.fromisoformat(date)
        except ValueError:
            wrong.append(f"CHANGELOG.md: {newest} is dated {date!r}, expected 'unreleased' or YYYY-MM-DD")
    if tag is not None and tag != f"v{version}":
        wrong.append(f"the tag is {tag}, pyproject.toml says {version}: expected v{version}")
    if tag is not None and date == "unreleased":
        wrong.append(f"CHANGELOG.md: {newest} is unreleased, a release's section has its date")
    return wrong


def main(tag: str | None = None) -> int:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    wrong = check(version, (ROOT / "CHANGELOG.md").read_text(), tag)
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    print(version)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
