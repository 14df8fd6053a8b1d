"""Tool calls: the functions that a model may call, and the recognition of its calls in its text.

`tools` has the functions of a request and puts them into the prompt; `call_format` has the markers and the parser that
mlx-lm knows for the model; `answer_reader` splits a text that arrives in pieces into the events of `events`;
`call_grammar` makes a grammar that holds the model to the schemas of the functions, in the model's own format.
"""
