"""Layer 2: answers the programs' requests, over torch.distributed or in the simulator; both write a ledger."""
