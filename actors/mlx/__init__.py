"""mlx-lm's models and caches, as the actors see them. A new cache class goes into `cache_rewind` and `cache_state`."""
