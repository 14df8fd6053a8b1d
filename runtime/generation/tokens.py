"""One generated token."""

from __future__ import annotations

import attrs

from protocol.copying import DraftedBy
from protocol.reprs import brief
from protocol.scores import TopLogprob
from protocol.session_state import FinishReason
from runtime.generation.tool_calls.events import Delta


@attrs.frozen
class Token:
    """One generated token.

    Attributes:
        id: in the target's vocabulary.
        text: the text that this token makes readable, possibly empty. The texts of a stream add up to the
            tokenizer's decoding of its ids, up to a stop string if one ended it, and without a part of a character
            at which `max_tokens` or the context has cut it off; an end-of-text token has no text.
            Text that may begin a stop string is withheld until it is known not to.
        index: 0 for the first generated token.
        drafted_by: "model" if a draft model or trained drafter had proposed it, "copy" if it was copied from earlier in
            the text, "grammar" if its grammar forces it, None if it is the target's own.
        finish_reason: None where the text goes on; "stop" at an end-of-text or stop token, or where a stop string is
            complete; "length" where `max_tokens` or the context is used up.
        stop_reason: the stop string, or the id among `stop_tokens`, that ended the text. None where the text goes on,
            where it ends by its length, and at an end-of-text token of the tokenizer that is not in `stop_tokens`.
        logprob: its log-probability, <= 0, under the target, after logits processors, before filters and temperature.
            None unless the setting `logprobs` asks for it.
        is_thinking: whether it belongs to the reasoning, tags included, by the tags that the tokenizer names.
        top_logprobs: the most probable tokens at its position, most probable first; as many as `logprobs` says.
        is_tool_call: whether it belongs to a tool call, markers included; for an opening marker, only its last token.
        deltas: the content, reasoning and tool calls that it adds; empty for a generation without tools.
    """

    id: int
    text: str
    index: int
    drafted_by: DraftedBy | None
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()
    stop_reason: str | int | None = None
    is_thinking: bool = False
    is_tool_call: bool = False
    deltas: tuple[Delta, ...] = ()

    @property
    def from_draft(self) -> bool:
        """Whether it had been proposed."""
        return self.drafted_by is not None

    @property
    def is_complete(self) -> bool:
        """Whether the model has ended the text with this token, an end-of-text or stop token."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)

    def __repr__(self) -> str:
        usual = {field.name: field.default for field in attrs.fields(Token) if field.name != "deltas"}
        changed = {name: getattr(self, name) for name, default in usual.items() if getattr(self, name) != default}
        if self.top_logprobs:
            changed["top_logprobs"] = changed.pop("top_logprobs")  # the longest, which may be cut, at the end
        return brief("Token", changed)
