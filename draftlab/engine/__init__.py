"""The decoding engine: propose, verify, count."""
