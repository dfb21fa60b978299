"""All ranks sum a tensor with gloo; each prints the sum and what its own interface sent meanwhile."""

import sys

if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    from gossamer.bench.lab import own_counters

    dist.init_process_group("gloo")
    size = int(sys.argv[1])
    tensor = torch.full((size,), float(dist.get_rank() + 1))
    before = own_counters()
    dist.all_reduce(tensor)
    dist.barrier()
    print(tensor.unique().tolist(), (own_counters() - before).sent_bytes)
    dist.destroy_process_group()
