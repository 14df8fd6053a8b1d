"""Traces: Chrome trace JSON and the timeline page."""
