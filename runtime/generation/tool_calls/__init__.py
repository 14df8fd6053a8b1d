"""Tool calls: the functions that a model may call, and the recognition of its calls in its text.

`tools` has the functions of a request and puts them into the prompt. `call_format` has the markers and the layouts of
calls: `call_reader` reads them by these, and `call_objects` those that are JSON objects, in a text that arrives in
pieces (`incoming_text`), and `answer_reader` splits an answer into the events of `events`. `call_grammar` makes a
grammar that holds a model to the schemas of the functions.
"""
