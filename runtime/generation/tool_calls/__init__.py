"""Tool calls: the functions that a model may call, and its calls told apart from the rest of its text.

`tools` has the functions of a request and how they reach the prompt, `call_format` the markers and the parser that
mlx-lm knows for the model, `answer_reader` splits a text that arrives in pieces into the events of `events`, and
`call_grammar` makes a grammar that holds the model to the schemas of the functions, in its own format.
"""
