"""Output to a terminal: progress, tables, signals."""
