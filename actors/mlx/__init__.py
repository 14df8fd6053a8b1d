"""mlx-lm's models and caches, behind the interface of `actors.model`. A new cache class gets a kind in `cache_kinds`;
no other module tests for a cache class.
"""
