"""A drafter in another process, or at a rank of its own: loaded and asked from here, and at work at the other end."""
