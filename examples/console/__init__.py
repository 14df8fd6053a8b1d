"""The parts of `examples/terminal.py`: keys, a line editor, a page of text, the screen, and the terminal.

`keys` decodes bytes to events, `editor` applies events to the typed line, `page` wraps the text, `screen` lays out and
paints frames, and `terminal` reads and writes. All but `terminal` are pure.
"""
