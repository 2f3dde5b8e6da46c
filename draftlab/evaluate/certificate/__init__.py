"""The losslessness certificate: a statistical test that drafting keeps the distribution."""
