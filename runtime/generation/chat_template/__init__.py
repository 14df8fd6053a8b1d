"""Chat templates: from chat messages to the text of a prompt, whatever the template refuses or calls its switches.

A template is a program that was written for certain messages. It is tried out once, with short chats, and the outcome
is kept with the tokenizer. So the shape of a prompt does not change within a conversation, and its prefix is reused.

`rendering` renders; `probes` tries out which `repairs` of messages a template needs, and `known` what else has to be
known of it.
"""
