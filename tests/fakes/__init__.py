"""Fakes that ship with the tests: scripted runners, executors, engines, tokenizers, tiny models."""
