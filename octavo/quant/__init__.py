"""How a linear layer stores and multiplies. Knows no architectures."""
