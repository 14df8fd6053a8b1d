"""Generation: from a prompt to the tokens and texts that a consumer reads.

`text` encodes prompts and chat messages and decodes tokens, up to stop strings; `token_stream` is the stream of one
generation, and `tokens` has its tokens; `many_prompts` merges many streams; `conversation` makes prompts of turns;
`reasoning` splits the reasoning from an answer, and limits it; `grammar` constrains a text; `tool_calls/` finds tool
calls, and `answers/` reads answers of several messages.
"""
