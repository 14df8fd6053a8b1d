"""A chat template as a function, and texts by which the places of messages in what it writes are found."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from runtime.generation.chat_template.probes import tried
from runtime.generation.chat_template.repairs import Chat, Message
from runtime.generation.chat_template.tags import tags_of

USER_MARK, ANSWER_MARK = "userone", "answerone"
QUESTION: Message = {"role": "user", "content": USER_MARK}


def plain(tokenizer: Any, switches: Mapping[str, Any], chat: Chat) -> str:
    """The text that a template makes of a chat. Raises: whatever it raises, as it is third-party code."""
    variables = {"add_generation_prompt": True, **switches, "tokenize": False}
    if not getattr(tokenizer, "has_thinking", True) and tags_of(tokenizer) is not None:
        # mlx-lm switches reasoning on if it knows the tags, and off if it does not.
        variables.setdefault("enable_thinking", True)
    if chat.tools:
        variables["tools"] = [dict(tool) for tool in chat.tools]
    # Copies: some templates modify the messages.
    return cast(str, tokenizer.apply_chat_template([dict(message) for message in chat.messages], **variables))


def tried_with(tokenizer: Any, *messages: Message, **switches: Any) -> str | None:
    """The text of messages with variables of the template; None if it raises an error."""
    return tried(partial(plain, tokenizer, switches), Chat(messages))
