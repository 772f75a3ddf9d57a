"""A worker server: the weight routes of vLLM's RL API around a PyTorch module."""
