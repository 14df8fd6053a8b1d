"""JSON schemas to grammars within limits of CPU time and memory."""
