"""What `examples/terminal.py` is made of, beside the models: keys, a line that is edited, a page, a screen, a terminal.

All but the terminal itself is pure.
"""
