"""A rank whose store stands still ends cleanly, also if the store's host dies just when its interpreter is taken down."""

import subprocess
import sys

import pytest
from tests.gang import free_port

pytestmark = pytest.mark.gang

ENDING = """
import gc, os, signal, sys, time, warnings
import torch, torch.distributed as dist
from gossamer.core.errors import PeerError
from gossamer.core.verbs import all_reduce
from gossamer.fabrics.torch.fabric import TorchFabric

class Last:
    # Collected with the last modules, when no other thread of Python's may go on.
    def __init__(self, host):
        self.host = host

    def __del__(self, kill=os.kill, sleep=time.sleep):
        kill(self.host, 9)
        sleep(1.0)

torch.set_num_threads(1)
gc.freeze()  # what both begin with is not looked through by each as it ends, which takes a second
warnings.filterwarnings("ignore", ".*fork")
children = []
for rank in range(2):
    if not (child := os.fork()):
        break
    children.append(child)
else:
    code = os.waitstatus_to_exitcode(os.waitpid(children[1], 0)[1])
    os.kill(children[0], 9)
    print("ended with", code)
    os._exit(0)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=rank, world_size=2)
fabric = TorchFabric(deadline=1.5, check=0)
fabric.run(all_reduce(torch.ones(1)))
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    fabric.run(all_reduce(torch.ones(4)))
except PeerError as error:
    print(error, flush=True)
fabric.close()
sys.last = Last(children[0])
"""


def test_no_thread_wakes_while_the_interpreter_is_taken_down() -> None:
    command = [sys.executable, "-c", ENDING, str(free_port())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "(usually rank 0) is frozen" in ended.stdout
    assert ended.stdout.endswith("ended with 0\n"), ended.stderr[-2000:]
