"""A model's part of a saved session. Caches' states are in `actors.mlx`, the file format in `runtime.persistence`."""
