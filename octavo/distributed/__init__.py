"""Ranks and collectives as objects; executors. Knows not what a worker does."""
