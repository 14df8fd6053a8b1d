"""Benchmarks: contenders that decode the same prompts with the same models, timed alike."""
