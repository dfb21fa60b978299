"""What others need to launch is not needed here: nothing of torchft, Ray or SkyPilot is imported."""

import subprocess
import sys

LOOKS = """
import importlib, pkgutil, sys

class Notes:
    asked = set()

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torchft", "ray", "sky", "torchdata"):
            frame, ours = sys._getframe(1), False
            while frame is not None:
                ours = ours or frame.f_globals.get("__name__", "").startswith("gossamer.") and frame.f_code.co_name == "<module>"
                frame = frame.f_back
            self.asked.add(name)

sys.meta_path.insert(0, Notes())
import gossamer
others = ("gossamer.trainers", "gossamer.bench")
for module in pkgutil.walk_packages(gossamer.__path__, "gossamer."):
    if module.name != "gossamer.__main__" and not module.name.startswith("gossamer.bench.compare.gpu"):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
import torch
model = torch.nn.Linear(2, 1)
with gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "qsgd"):
    model(torch.ones(1, 2)).sum().backward()
print(sorted(Notes.asked))
"""


def test_nothing_of_them_is_imported() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LOOKS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr
