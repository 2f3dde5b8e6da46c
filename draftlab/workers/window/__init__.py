"""Recording of a window of the store while a head trains on it."""
