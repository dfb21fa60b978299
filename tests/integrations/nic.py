"""One host of a lab: trains under each recipe in turn; prints bytes by the ledger and bytes by the interface."""

import sys

STEPS, WARM = 30, 5  # the first requests are compared over the store, which costs bytes of its own

if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    import gossamer
    from gossamer.lab import own_counters

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for recipe in sys.argv[1:]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        comm = gossamer.attach(model, optimizer, recipe, deadline=60)
        x = torch.randn(2, 512, generator=torch.Generator().manual_seed(rank))
        for step in range(-WARM, STEPS):
            if step == 0:
                dist.barrier()
                noted, counted = comm.ledger.sent, own_counters()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        dist.barrier()
        seen = own_counters() - counted
        print(recipe, comm.ledger.sent - noted, seen.sent_bytes, sep="\t", flush=True)
        dist.barrier()
        comm.detach()
    dist.destroy_process_group()
