"""The terminal: what commands write, and the signals that interrupt them.

`display` has stdout, progress and statistics, `tables` lays out tables for any width, and `signals` decides what SIGINT
and SIGTERM do.
"""
