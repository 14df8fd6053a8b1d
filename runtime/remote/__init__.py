"""A drafter in another process, or on a rank of its own: loaded from here, and working at the other end."""
