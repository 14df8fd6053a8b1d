"""The cases of all peers, and their table in the guide. As a script, it writes the table there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import peer_cases_llama_cpp
import peer_cases_mlx_lm
import peer_cases_vllm
from peer_cases import Case

CASES = [*peer_cases_mlx_lm.CASES, *peer_cases_vllm.CASES, *peer_cases_llama_cpp.CASES]
# Where each has its tests.
PEERS = {"mlx-lm": "tests", "vLLM": "tests/entrypoints", "llama.cpp": "tools/server/tests/unit"}

GUIDE = Path(__file__).parents[2] / "docs" / "clients.md"
# The table is the end of the guide.
BEGIN = "### mlx-lm\n"


def table(cases: Sequence[Case] = CASES) -> str:
    """The cases as the guide shows them."""
    lines = []
    for peer, folder in PEERS.items():
        of_peer = [case for case in cases if case.peer == peer]
        num_passing = sum(case.instead is None for case in of_peer)
        lines += [f"### {peer}", "", f"Tests in `{folder}`; {num_passing} of these {len(of_peer)} pass.", ""]
        lines += ["| test | what it expects | here |", "|---|---|---|"]
        lines += [
            f"| {case.file.removesuffix('.py')}: `{case.test}` | {case.expects} | {case.instead or 'passes'} |"
            for case in of_peer
        ]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def in_guide() -> str:
    """The table that the guide has."""
    _, begin, rest = GUIDE.read_text(encoding="utf-8").partition(BEGIN)
    return begin + rest


if __name__ == "__main__":
    GUIDE.write_text(GUIDE.read_text(encoding="utf-8").partition(BEGIN)[0] + table(), encoding="utf-8")
