"""Chat templates: from chat messages to the text of a prompt, whatever the template refuses or calls its switches.

A template is a program that was written for certain messages. It is tried out once, with short chats, and the outcome
is kept with the tokenizer. So the shape of a prompt does not change within a conversation, and its prefix is reused.

`rendering` renders; `probes` tries out which `repairs` of messages a template needs; `switches` finds its switch for
reasoning, and `answer_start` where it begins an answer.
"""

from runtime.generation.chat_template.answer_start import begins_answer, opens_reasoning, space_before_closing
from runtime.generation.chat_template.rendering import render_chat_template
from runtime.generation.chat_template.switches import asks_for_reasoning, lacks_switch, thinking_switch
from runtime.generation.chat_template.tags import structural_markers, tags_of

__all__ = [
    "asks_for_reasoning",
    "begins_answer",
    "lacks_switch",
    "opens_reasoning",
    "render_chat_template",
    "space_before_closing",
    "structural_markers",
    "tags_of",
    "thinking_switch",
]
