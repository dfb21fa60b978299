"""What others need to launch is not needed here: nothing of torchft, Ray or SkyPilot is imported."""

import subprocess
import sys

LOOKS = """
import importlib, pkgutil, sys

asked = set()

class Notes:  # asked before all others where a module is, also one that is not installed
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torchft", "ray", "sky"):
            asked.add(name)

sys.meta_path.insert(0, Notes())
import gossamer
import torch

modules = [m.name for m in pkgutil.walk_packages(gossamer.__path__, "gossamer.") if not m.name.endswith("__main__")]
for name in modules:
    importlib.import_module(name)
model = torch.nn.Linear(2, 1)
with gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "qsgd"):
    model(torch.ones(1, 2)).sum().backward()
assert {"gossamer.trainers.hf", "gossamer.bench.cli.doctor", "gossamer.fabrics.liveness.members"} <= {*modules}
print(sorted(asked))
try:
    import torchft.manager
except ImportError:
    pass
print("torchft" in asked)
"""


def test_nothing_of_them_is_imported() -> None:
    command = [sys.executable, "-W", "ignore", "-c", LOOKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["[]", "True"]
