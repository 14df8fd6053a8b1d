"""Generation: from a prompt to the tokens and texts that a consumer reads.

`text` encodes prompts and chat messages and decodes tokens, up to stop strings; `token_stream` is the stream of one
generation, on `token_reader`; `many_prompts` merges the streams of many; `conversation` makes prompts of turns;
`reasoning` splits the reasoning from an answer; `grammar` constrains a text. Tool calls belong here as well: chat
templates that take tools beside `text`, and the parser of calls beside `reasoning`.
"""
