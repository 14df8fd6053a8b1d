"""The last report of a self-test on this machine: kept by `outrider selftest`, read by `outrider doctor`.

Imports nothing that needs mlx.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from runtime.measuring.machine import versions
from runtime.measuring.report_files import FORMAT

# A report of another version of one of these packages is out of date.
_DECISIVE = ("outrider", "mlx", "mlx-lm")


def path_of_last_report() -> Path:
    """Where the last report is kept: `outrider/selftest.json` in the user's cache directory.

    Raises: RuntimeError: the user has no home directory.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "outrider" / "selftest.json"


def keep(report: dict[str, Any]) -> None:
    """Keep a report for `rows_of_last_report`.

    Raises: OSError, RuntimeError: it cannot be written.
    """
    path = path_of_last_report()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed, so that nobody reads half of it.
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(report, indent=2) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def rows_of_last_report() -> list[tuple[str, str]]:
    """What the last report says, as rows of (name, text); empty if there is no valid report."""
    try:
        return _rows(json.loads(path_of_last_report().read_text()))
    # No file, no home directory, no JSON, or not what `keep` has written.
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    if report["format"] != FORMAT:
        return []
    results = report["results"]
    rows = [("result", f"{results['summary']} ({report['date']})")]
    rows += [(f"failed: {name}", meaning) for name, meaning in results["failures"].items()]
    whose = "your models" if results["own_models"] else "the demo pair"
    rows += [(f"best for {whose}: {name}", text) for name, text in results["settings"].items()]
    now = versions()
    if stale := [name for name in _DECISIVE if report["versions"].get(name) != now.get(name)]:
        then = ", ".join(f"{name} {report['versions'].get(name, 'missing')}" for name in stale)
        rows.append(("out of date", f"it was made with {then}; run outrider selftest again"))
    return rows
