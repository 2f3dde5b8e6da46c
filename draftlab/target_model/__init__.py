"""The frozen target model: loading, KV caches, attention, fast decode paths."""
