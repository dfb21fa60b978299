"""Floor 2: the only code that answers requests: torch.distributed, the simulator, and the ledger both write."""
