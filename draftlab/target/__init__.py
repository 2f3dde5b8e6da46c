"""The frozen model whose decoding a head speeds up."""
