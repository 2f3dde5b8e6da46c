"""Reports for readers: a list of sections in the console, on an offline HTML page, in a card."""
