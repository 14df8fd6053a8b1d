"""Saved conversations and streams.

`session_file` is the container: a safetensors file with a checksum, written atomically and read with suspicion.
`saved_session` is the content: messages, settings, tokens, and the fingerprints of the models. `saving` collects the
content from a runtime's models and puts it back. What the models have cached is saved by `actors.persistence`.
"""
