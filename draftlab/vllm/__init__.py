"""An installed vLLM as engine, for answers and for hidden states."""
