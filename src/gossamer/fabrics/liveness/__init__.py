"""Liveness: who is there, who is frozen or lost, and the store in which ranks tell one another."""
