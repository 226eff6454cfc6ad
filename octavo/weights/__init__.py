"""Checkpoints as streams of (name, tensor). Knows no model classes."""
