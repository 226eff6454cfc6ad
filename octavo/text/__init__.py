"""Tokenizers, chat templates, incremental detokenizing, stop strings. Knows no engine."""
