"""The changelog begins with the package's version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_newest_version_in_the_changelog_is_the_packages() -> None:
    versions = re.findall(r"^## \[(.+?)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    package = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert versions[0] == package["version"]
    assert len(versions) == len(set(versions))
