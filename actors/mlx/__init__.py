"""mlx-lm's models and caches, behind the interface of `actors.model`. Only `cache_kinds` tests for a cache class."""
