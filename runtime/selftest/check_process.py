"""The process of one check: `python -m runtime.selftest.check_process MODULE NAME`, with a subject as JSON on stdin.

The subject is the first line on stdin, which stays open: when it closes, the starter has gone, and the process ends.
The last line on stdout is the finding as JSON. Whatever else the process prints is for people.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback

ORPHANED = 3


def main(module: str, name: str) -> None:
    """Run the check, and print its finding."""
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    # Imported here and not at the top: the environment of this process decides how these modules start.
    from runtime.loading.device import use_device
    from runtime.selftest.checks import Finding
    from runtime.selftest.subject import Subject

    try:
        use_device(given.pop("device", None))
        finding: Finding = getattr(importlib.import_module(module), name)(Subject(**given))
    except Exception as error:  # of any kind: it is what the check has found
        traceback.print_exc()
        finding = Finding("failed", f"the check ended with {type(error).__name__}", {"error": str(error)[:2000]})
    sys.stdout.write(json.dumps(finding.as_json()) + "\n")
    sys.stdout.flush()


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(ORPHANED)


if __name__ == "__main__":
    main(*sys.argv[1:])
