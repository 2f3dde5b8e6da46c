"""Draft heads: their mathematics, and the folder a head lives in."""
