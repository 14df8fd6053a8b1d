"""Traces of a runtime: files in Chrome's trace event format, and the timeline page.

`protocol.trace` defines the events. `trace_files` writes them to a file while the runtime works, and `timeline` turns
them into one HTML page (`timeline.html` draws it). To add a trace format, add a `Recorder` to `trace_files`.
"""
