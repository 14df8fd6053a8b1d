"""How much of prompts was read."""

from collections import Counter

from protocol.trace import Event, Span


class Prefills:
    """A trace that counts the prompt tokens that were read."""

    def __init__(self) -> None:
        self._num_read = Counter[str]()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Span) and event.kind == "prefill":
            self._num_read[event.actor] += event.num_tokens

    def num_read(self, actor: str) -> int:
        """Prompt tokens read since the last call."""
        return self._num_read.pop(actor, 0)
