"""Speculative decoding: propose drafts, verify them by rejection sampling, count."""
