"""The process of one check: `python -m runtime.selftest.check_process MODULE NAME`, a subject as JSON on stdin.

The last line on stdout is the finding as JSON. Whatever else the process prints is for people.
"""

from __future__ import annotations

import importlib
import json
import sys

from protocol.errors import OutriderError


def main(module: str, name: str) -> None:
    """Run the check, and print its finding."""
    given = json.load(sys.stdin)
    device = given.pop("device", None)
    # Here and not at the top: the environment of this process decides how they begin.
    import mlx.core as mx

    from actors.workers.worker import JobError
    from runtime.selftest.findings import Finding
    from runtime.selftest.subject import Subject

    if device is not None:
        mx.set_default_device(mx.Device(mx.cpu if device == "cpu" else mx.gpu))
    check = importlib.import_module(module)
    try:
        finding: Finding = getattr(check, name)(Subject(**given))
    except (OutriderError, JobError, RuntimeError, ValueError, MemoryError) as error:  # MLX raises the last three
        finding = Finding("failed", f"the check ended with {type(error).__name__}", {"error": str(error)[:2000]})
    sys.stdout.write(json.dumps(finding.as_json()) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
