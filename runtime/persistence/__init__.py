"""Saved conversations and streams, and prefix caches on disk.

`session_file` is the container: a safetensors file with a checksum, written atomically and read with suspicion.
`saved_session` has the content of a session (messages, settings, tokens, fingerprints), and saves and loads it. What
the models have cached is saved by `actors.persistence`.
"""
