"""Architectures as short declarations over shared layers. Knows neither batching nor devices."""
