"""The engine's numerical operations: fast variants beside their plain PyTorch references."""
