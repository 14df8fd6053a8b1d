"""A target that is sharded over several ranks: opening it at rank 0, and following at the others."""
