"""Workers, which run the jobs of one model on a thread."""
