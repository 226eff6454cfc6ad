"""Composition root, step loop, process boundary, service. Knows no HTTP."""
