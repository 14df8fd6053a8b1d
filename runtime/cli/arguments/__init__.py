"""Arguments that several commands have: the models, how they are loaded, settings, and flags of mlx-lm's commands."""
