"""The splitter of reasoning and answer in a text that arrives in pieces.

`runtime.generation.reasoning` splits tokens instead, since one implementation cannot serve both: it marks a token at
once, by ids, and pieces before it may still turn out to be a tag, while text that was sent to a client cannot be taken
back and no longer shows which token a piece of it came with.
"""

from __future__ import annotations

from protocol.stop_strings import StopMatcher


class ReasoningSplitter:
    """Splits a text that arrives in pieces into reasoning and answer, without the tags and the whitespace around them.

    It finds tags by their text, also where one is spread over pieces. It withholds text that may become a tag, and
    whitespace that may be the last of the reasoning. The result does not depend on where the text is cut.
    """

    def __init__(self, tags: tuple[str, str], *, is_thinking: bool) -> None:
        """For one text.

        Args:
            tags: the opening and the closing tag; not empty.
            is_thinking: whether the text begins within the reasoning.
        """
        self._tags = tags
        self._is_thinking = is_thinking
        self._withheld = ""  # possibly the beginning of a tag
        self._matcher = self._next_tag()
        # Whether to keep leading whitespace: at the beginning of an answer, and after other text, but not after a tag.
        self._keeps_whitespace = not is_thinking
        self._trailing = ""  # withheld whitespace at the end of the reasoning so far

    def add(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Add the next piece of text.

        Returns: the new text of the answer, and that of the reasoning.
        """
        added: dict[bool, str] = {False: "", True: ""}  # by whether it is reasoning
        while True:
            passed = self._matcher.add(text)
            if self._matcher.found is None:
                break
            added[self._is_thinking] += self._stripped(passed)
            # The matcher may have passed text of earlier pieces, too.
            text = (self._withheld + text)[len(passed) + len(self._matcher.found) :]
            self._is_thinking = not self._is_thinking
            self._matcher, self._keeps_whitespace, self._withheld, self._trailing = self._next_tag(), False, "", ""
        self._withheld = (self._withheld + text)[len(passed) :]
        if is_last:
            passed += self._matcher.finish()
        added[self._is_thinking] += self._stripped(passed)
        return added[False], added[True]

    def _next_tag(self) -> StopMatcher:
        return StopMatcher([self._tags[1 if self._is_thinking else 0]])

    def _stripped(self, text: str) -> str:
        if not self._keeps_whitespace:
            text = text.lstrip()
            self._keeps_whitespace = bool(text)
        if not self._is_thinking:
            return text
        text = self._trailing + text
        kept = text.rstrip()
        self._trailing = text[len(kept) :]
        return kept
