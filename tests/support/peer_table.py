"""The cases of all peers, and the guide's tables of those that are answered differently. As a script, it writes them there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import peer_cases_llama_cpp
import peer_cases_mlx_lm
import peer_cases_vllm
from peer_cases import Case

CASES = [*peer_cases_mlx_lm.CASES, *peer_cases_vllm.CASES, *peer_cases_llama_cpp.CASES]

GUIDE = Path(__file__).parents[2] / "docs" / "clients.md"
# The tables are the end of the guide.
BEGIN = "### mlx-lm\n"


def table(cases: Sequence[Case] = CASES) -> str:
    """The cases that are answered differently, as the guide shows them."""
    lines = []
    for peer in dict.fromkeys(case.peer for case in cases):
        of_peer = [case for case in cases if case.peer == peer]
        different = [case for case in of_peer if case.instead is not None]
        lines += [f"### {peer}", "", f"{len(of_peer) - len(different)} of {len(of_peer)} tests pass.", ""]
        if different:
            lines += ["| its test expects | here |", "|---|---|"]
            lines += [f"| {case.expects} | {case.instead} |" for case in different]
            lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def in_guide() -> str:
    """The tables that the guide has."""
    _, begin, rest = GUIDE.read_text(encoding="utf-8").partition(BEGIN)
    return begin + rest


if __name__ == "__main__":
    GUIDE.write_text(GUIDE.read_text(encoding="utf-8").partition(BEGIN)[0] + table(), encoding="utf-8")
