"""Models by what a user calls them: a path, a hub id or a pair (model, tokenizer); what drafts for them; and MLX's
BLAS.
"""
