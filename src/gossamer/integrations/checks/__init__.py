"""Checks: what is refused or warned of about models, optimizers, wrappers and training loops, and what is guessed of them."""
