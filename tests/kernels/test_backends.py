"""Import cost, the fallback without Numba, compilation, and the benchmark."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gossamer import kernels
from gossamer.bench.kernels import measure
from gossamer.kernels import cpu

kernels_backends = sys.modules["gossamer.kernels.backends"]  # the function of that name hides the module

WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in ("numba", "triton") else real(name, *a)
import torch, gossamer.kernels as kernels
assert kernels.backends() == ("torch",), kernels.backends()
x = torch.randn(1000)
scale = kernels.absmax(x, (0, 1000))
kernels.ternary_decode(kernels.ternary_encode(x, (0, 1000), scale, (1, 2)), (0, 1000), scale, x, 1.0)
kernels.warmup()
"""


LOADED = """
import os, sys, torch, gossamer.kernels as kernels
from gossamer.bench.cli import doctor
for folder in sys.argv[1:]:
    if os.fork() == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder + "/" + name, os.O_WRONLY | os.O_CREAT), number)
        sys.path.insert(0, folder)
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
"""


BROKEN_NUMBA = """
x = torch.tensor([1.0, -3.0])
print(kernels.absmax(x, (0, 2)).item(), kernels.divide(x, 2).item())
kernels.warmup()
print(doctor._compiler("cpu", doctor.environment()["kernels"]["cpu"]))
"""


def test_numba_is_optional():
    """That it is imported late is seen in tests/test_house.py."""
    head = f"import sys; sys.path[:0] = {sys.path!r}\n"
    subprocess.run([sys.executable, "-W", "error", "-c", head + WITHOUT_NUMBA], check=True, timeout=300)


BROKEN = ["ImportError('Numba needs NumPy 2.2 or less')", "SystemError('initialization failed')", "OSError('llvmlite')"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How a program ends with each of them, and what it prints and warns of: forks of one that has loaded torch."""
    folders = {error: tmp_path_factory.mktemp("broken") for error in BROKEN}
    for error, folder in folders.items():
        (folder / "numba").mkdir()
        (folder / "numba" / "__init__.py").write_text(f"raise {error}\n")
    program = f"import sys; sys.path[:0] = {sys.path!r}\n{LOADED}{BROKEN_NUMBA}"
    command = [sys.executable, "-c", program, *map(str, folders.values())]
    codes = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    said = [[(folder / name).read_text() for name in ("out", "err")] for folder in folders.values()]
    return {error: (code, *words) for error, code, words in zip(BROKEN, codes, said, strict=True)}


@pytest.mark.parametrize("error", BROKEN)
def test_a_numba_that_cannot_be_imported_is_told_of_once_and_not_used(ended, error):
    code, out, err = ended[error]
    cause = error.replace("('", ": ").removesuffix("')")
    told = f"plain torch, which is slower; numba cannot be used ({cause}): pip install --upgrade numba"
    assert (code, out.splitlines()) == ("0", ["3.0 1.5", told]), err
    assert err.count("RuntimeWarning") == err.count(f"cannot be used ({cause})") == 1, err


def test_a_user_without_a_home_has_a_temporary_cache_of_kernels(monkeypatch, tmp_path):
    """In a container HOME may be unset, and the system may not know the user; nor can the installation be written to."""

    def unknown(number):
        raise KeyError(number)

    real, here = os.access, str(Path(cpu.__file__).parent)
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).startswith(here) and real(path, mode))
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")  # so that it is put back
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cpu._ensure_cache()
    assert Path(os.environ["NUMBA_CACHE_DIR"]).parent == tmp_path


@pytest.mark.skipif("numba" not in kernels.backends(), reason="numba is not installed")
def test_warmup_compiles_everything_that_a_step_needs():
    from gossamer.kernels.cpu import eden, indices, lanes, levels, places, quantise, scales, select, sign, ternary

    def compiled() -> int:
        modules = (eden, indices, lanes, levels, places, quantise, scales, select, sign, ternary)
        values = [value for module in modules for value in vars(module).values()]
        return sum(len(value.signatures) for value in values if hasattr(value, "signatures"))

    kernels.warmup()
    before = compiled()
    measure(elements=1000, rounds=1)
    x = torch.ones(10)
    kernels.scatter_add(x, kernels.topk(x, 3), x[:3].clone(), weight=0.5)
    kernels.lanes_unpack(kernels.lanes_pack(kernels.ternary_levels(x, (0, 10), x[:1], (1, 2)), 1, 8), 10, 1, 8)
    kernels.sign_decode(torch.zeros(2, dtype=torch.uint8), (0, 10), x[:1], x, 0.5)
    kernels.absmax_and_std(x, (0, 3, 10))
    assert compiled() == before


WARM = """
import sys, torch
from gossamer import kernels
from gossamer.codecs.warm import warm
from gossamer.core.bucket import Bucket
from gossamer.core.contracts import Context
from gossamer.core.rng import CounterRng
from gossamer.recipe import Recipe

def loaded():
    modules = [m for name, m in sys.modules.items() if name.startswith("gossamer.kernels.cpu.")]
    return {k for m in modules for k, v in vars(m).items() if getattr(v, "signatures", None)}

kernels.warmup("lanes")
assert loaded() and "_absmax" not in loaded(), loaded()
before = loaded()
recipe = Recipe.of("scatter(ternary(), answer=qsgd(bits=3))")
warm(recipe, torch.device("cpu"))
known = loaded()
assert "_absmax_and_rms" in known and "_compact" not in known, known
block = Bucket.of({"a": torch.randn(1000), "b": torch.randn(3, 4)})
for codec in (recipe.exchange.codec, recipe.exchange.answer):
    codec.decode(codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0))), block)
assert loaded() == known
try:
    kernels.warmup("lanes", "ternery")
except ValueError as error:
    assert "ternery" in str(error) and "ternary" in str(error)
"""


@pytest.mark.skipif("numba" not in kernels.backends(), reason="numba is not installed")
def test_a_recipe_loads_the_kernels_that_it_uses_and_no_others():
    head = f"import sys; sys.path[:0] = {sys.path!r}\n"
    subprocess.run([sys.executable, "-W", "error", "-c", head + WARM], check=True, timeout=300)


@pytest.mark.skipif("triton" not in kernels.backends(), reason="triton is not installed")
def test_a_triton_that_cannot_launch_is_told_of_once_and_not_used(monkeypatch):
    # a tensor on the meta device cannot be given to a GPU, and here is none to take it
    nowhere = torch.device("meta")
    monkeypatch.setattr(kernels_backends, "_verdicts", {})
    with pytest.warns(RuntimeWarning, match="Triton does not run on meta .*C compiler"):
        assert not kernels_backends.triton_runs(nowhere)
    assert not kernels_backends.triton_runs(nowhere)  # and no second warning, which would be an error here


@pytest.mark.parametrize("runs", [True, False])
def test_where_triton_does_not_run_gpus_use_torch(monkeypatch, runs):
    device = torch.device("cuda:3")
    monkeypatch.setattr(kernels_backends, "backends", lambda: ("torch", "numba", "triton"))
    monkeypatch.setattr(kernels_backends, "numba_fault", lambda: None)
    monkeypatch.setattr(kernels_backends, "_verdicts", {device: runs})
    assert kernels_backends.chosen(device) == ("triton" if runs else "torch")
    assert kernels_backends.chosen(torch.device("cpu")) == "numba"
    assert kernels_backends.chosen(torch.device("meta")) == "torch"


@pytest.mark.skipif("triton" not in kernels.backends(), reason="triton is not installed")
def test_triton_launches_on_the_device_of_its_tensors(monkeypatch):
    seen = []

    @contextmanager
    def device(index):
        seen.append(f"on {index}")
        yield
        seen.append(f"off {index}")

    monkeypatch.setattr(torch.cuda, "device", device)
    kernels_backends._load.cache_clear()
    real = kernels_backends._where_it_lies
    monkeypatch.setattr(kernels_backends, "_where_it_lies", lambda launch: real(lambda *_: seen.append("launch")))
    elsewhere = SimpleNamespace(device=torch.device("cuda:1"))
    try:
        for family, function in (("scales", "absmax"), ("ternary", "encode"), ("quantise", "read")):
            kernels_backends._load("triton", family, function)(elsewhere, (0, 4))
    finally:
        kernels_backends._load.cache_clear()
    assert seen == ["on cuda:1", "launch", "off cuda:1"] * 3


def test_the_benchmark_measures_no_more_than_it_is_asked_for():
    rows = measure(elements=1000, rounds=1, only=("ternary.decode", "absmax"))
    assert [row.kernel for row in rows] == ["absmax", "ternary.decode"]


def test_the_benchmark_has_a_row_for_every_kernel():
    rows = measure(elements=70_000, rounds=1)
    assert [row.kernel for row in rows] == [
        "absmax",
        "ternary.encode",
        "ternary.decode",
        "quantise4.encode",
        "quantise4.decode",
        "levels7.encode",
        "levels7.decode",
        *(f"eden{bits}.{way}" for bits in (1, 2, 4) for way in ("encode", "decode")),
        "int8.encode",
        "int8.decode",
        "e4m3.encode",
        "e4m3.decode",
        "sign.encode",
        "sign.decode",
        "sketch.encode",
        "sketch.estimate",
        "topk.0.1%",
        "topk.1%",
        "index.encode.1%",
        "index.decode.1%",
    ]
    assert all(row.gb_per_s > 0 and row.ratio_to_memcpy > 0 for row in rows)
