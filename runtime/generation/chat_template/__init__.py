"""Chat templates: from chat messages to the text of a prompt, whatever the template refuses or calls its switches.

A template is a program that was written for certain messages. It is tried out once, with short chats, and the outcome
is kept with the tokenizer. So the shape of a prompt does not change within a conversation, and its prefix is reused.

`rendering` renders; `probes` tries out which `repairs` of messages a template needs; `switches` finds its switch for
reasoning, and `answer_start` where it begins an answer.
"""
