"""The splitter of reasoning and answer in a text that comes in pieces.

`runtime.generation.reasoning` splits tokens instead, since one implementation cannot serve both: it marks a token at
once, by ids, and pieces before it may still turn out to be a tag, while text that was sent to a client cannot be taken
back and no longer shows which token a piece of it came with.
"""

from __future__ import annotations

from protocol.stop_strings import StopMatcher


class ReasoningSplitter:
    """Tells thoughts from what is said, in a text that comes in pieces, and leaves out the tags and the blanks around.

    By their text, so that a tag which is spread over pieces is found too; what may become one is withheld, and so are
    blanks that may be a thought's last. However a text is cut into pieces, the same is said and thought.
    """

    def __init__(self, tags: tuple[str, str], *, is_thinking: bool) -> None:
        """For one text.

        Args:
            tags: what opens a thought, and what closes it.
            is_thinking: whether the text begins within one.
        """
        self._tags = tags
        self._is_thinking = is_thinking
        self._seen = ""  # and not given yet
        self._matcher = self._watching()
        # What goes on now, with something to be seen. An answer may begin with blanks; what follows a tag does not.
        self._has_begun = not is_thinking
        self._blanks = ""  # after what was thought

    def add(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """What is said, and what is thought, in what comes next."""
        apart: dict[bool, str] = {False: "", True: ""}
        while True:
            given = self._matcher.add(text)
            if self._matcher.found is None:
                break
            apart[self._is_thinking] += self._without_margins(given)
            # What was withheld of earlier pieces counts among what was given.
            text = (self._seen + text)[len(given) + len(self._matcher.found) :]
            self._is_thinking = not self._is_thinking
            self._matcher, self._has_begun, self._seen, self._blanks = self._watching(), False, "", ""
        self._seen = (self._seen + text)[len(given) :]
        if is_last:
            given += self._matcher.finish()
        apart[self._is_thinking] += self._without_margins(given)
        return apart[False], apart[True]

    def _watching(self) -> StopMatcher:
        return StopMatcher([self._tags[1 if self._is_thinking else 0]])

    def _without_margins(self, given: str) -> str:
        if not self._has_begun:
            given = given.lstrip()
            self._has_begun = bool(given)
        if not self._is_thinking:
            return given
        whole = self._blanks + given
        self._blanks = whole[len(whole.rstrip()) :]
        return whole.rstrip()
