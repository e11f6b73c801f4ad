"""Documents and a question in, tokens out. Knows models and stores; knows no HTTP, no files and no settings."""
