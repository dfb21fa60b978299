"""Floor 0: the words that everything above is written in."""
