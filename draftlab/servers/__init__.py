"""Servers of the target: an installed vLLM, and any server with the OpenAI interface."""
