"""Models in GGUF files, the format of llama.cpp, as mlx-lm's models and tokenizers."""
