"""Arguments that several commands have: the models, how they are loaded, and settings."""
