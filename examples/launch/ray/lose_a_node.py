"""Tries train.py on a Ray cluster of two nodes, both on this machine, of which one is lost.

$ python examples/launch/ray/lose_a_node.py runs/ray
"""

import os
import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from train import fit

folder = sys.argv[1]
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
second = cluster.add_node(num_cpus=2)
ray.init(address=cluster.address)


def lose() -> None:
    """Take the second node away when the first checkpoint is there."""
    while not list(Path(folder).glob("elastic/checkpoint_*/public.pt")):
        time.sleep(0.2)
    cluster.remove_node(second, allow_graceful=False)
    print("a node is lost", flush=True)


threading.Thread(target=lose, daemon=True).start()
print(fit(folder, epochs=12).metrics)
ray.shutdown()  # before the cluster ends, whose end would end this process with an error
cluster.shutdown()
