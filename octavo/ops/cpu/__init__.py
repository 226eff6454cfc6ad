"""The CPU backend: fused kernels compiled by numba, products by oneDNN."""
