"""From what a user names to models on their threads: sources, trained drafters, the demo pair, BLAS."""
