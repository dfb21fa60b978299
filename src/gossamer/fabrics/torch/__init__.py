"""Real processes: requests over torch.distributed, on comm threads."""
