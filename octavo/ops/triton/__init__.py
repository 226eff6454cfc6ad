"""The Triton backend: fused kernels for any GPU that Triton compiles for."""
