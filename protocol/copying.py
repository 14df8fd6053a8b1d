"""Drafting without a model: by what followed the same tokens before, and by the grammar of a text.

The idea is that of LLMA (Yang et al. 2023, arXiv 2304.04487) and of prompt lookup decoding (Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding); counting occurrences is that of SuffixDecoding (Oliaro et al. 2024,
arXiv 2411.04975). `actors.drafters.copy_search` finds the copies; `Forcing`, what a grammar forces.
"""

from __future__ import annotations

import math
from typing import Literal

import attrs

# A draft model or trained drafter, a copy from earlier in the text, or the grammar that the text must follow.
DraftedBy = Literal["model", "copy", "grammar"]

MAX_MATCH = 16  # the most tokens of a match that are compared: a longer one counts as one of this length
# How often the token after the only match of 1, 2, … tokens was right, counted over files of Python's standard library
# in the demo pair's tokens, each file looked up in itself; what several matches are worth was counted there, too. These
# are initial values: the calibration learns from what is accepted.
_PRIORS = (0.24, 0.42, 0.52, 0.59, 0.64, 0.68, 0.73, 0.75, 0.77, 0.79, 0.79, 0.81, 0.81, 0.82, 0.83, 0.9)
_PRIOR_OF_DISAGREEING = 0.5
_PRIORS_OF_FORCED = (0.98, 0.8, 0.4)  # of a token that a grammar forces, by `Forced.doubt`
_NUM_COPIED_KINDS = 9  # kinds of what is copied, and of what is forced, for the calibration


@attrs.frozen
class Copied:
    """A token that followed earlier occurrences of the text's last tokens, and of the tokens copied after those."""

    token: int  # the one that followed most often
    match_length: int  # tokens before it that occurred there: at most `MAX_MATCH` of the text, and all those copied
    num_agreeing: int = 1  # how many of these occurrences the token followed, >= 1
    num_occurrences: int = 1  # how many there were, of those that were considered

    @property
    def confidence(self) -> float:
        """The prior probability, in (0, 1), that it is right if those before it are, by the text before the copy."""
        if self.num_agreeing < self.num_occurrences:
            return _PRIOR_OF_DISAGREEING * self.num_agreeing / self.num_occurrences
        once = _PRIORS[min(self.match_length, len(_PRIORS)) - 1]
        return 1.0 - (1.0 - once) * math.pow(self.num_agreeing, -0.8)

    @property
    def kind(self) -> int:
        """Which copies it is calibrated with, in [0, 9): by the length of the match, and whether occurrences agree."""
        support = 2 if self.num_agreeing < self.num_occurrences else min(self.num_agreeing - 1, 1)
        return 3 * support + min(self.match_length, 3) - 1


@attrs.frozen
class Forced:
    """A token of the text that a grammar forces."""

    token: int  # of the usual tokenisation of that text
    # 0 if all that it says is forced; 1 if it is a guess that there are such blanks, or none, or that nothing which
    # follows becomes part of it; 2 if the number or word before it may go on instead.
    doubt: int = 0

    @property
    def confidence(self) -> float:
        """As of `Copied`."""
        return _PRIORS_OF_FORCED[self.doubt]

    @property
    def kind(self) -> int:
        """Which tokens it is calibrated with, apart from all copies."""
        return _NUM_COPIED_KINDS + self.doubt


def drafter_of_kind(kind: int | None) -> DraftedBy:
    """Who has drafted tokens of a kind; None is the model's."""
    if kind is None:
        return "model"
    return "copy" if kind < _NUM_COPIED_KINDS else "grammar"
