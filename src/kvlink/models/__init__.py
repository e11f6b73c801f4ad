"""The floor that knows transformers: rotary tables, caches, forwards, prompts. Knows no stores and no HTTP."""
