"""Traces of a runtime: files in Chrome's trace event format, and the timeline page.

`protocol.trace` defines the events. `trace_files` writes them to a file while the runtime works, `timeline` turns them
into one HTML page (`timeline.html` draws it), and `drafter_states` derives from them what the drafter was doing. To add
a trace format, add a `Recorder` to `trace_files`.
"""
