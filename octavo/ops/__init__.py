"""Kernels behind plain functions. Knows no models."""
