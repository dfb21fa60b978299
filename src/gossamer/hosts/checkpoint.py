"""Checkpoints of a run: one folder for all ranks, in the format of `torch.distributed.checkpoint`, or a file for each."""

import io
import json
import warnings
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.core.errors import CheckpointError, PeerError, plainly
from gossamer.core.verbs import all_gather_ragged
from gossamer.hosts.communicator import Communicator
from gossamer.hosts.stored import Folder, read

__all__ = ["load", "read", "save"]

LIMIT = 2**30  # bytes of a rank's list of tensors
PLACE = "gossamer/tensor"  # what stands for a tensor in a tree that was cleared of them


def save(comm: Communicator, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
    """Save a whole run into a new folder: model, optimizer, communicator and what is `extra`; between steps, on all ranks.

    Entries of ranks that are equal are stored once, and where they differ (under local and gossip recipes) by rank, so
    that `load` goes on exactly. What is stored as `model` is the consensus: take it to evaluate, or to publish.
    """
    state = comm.state_dict()  # first, for it may end a step
    optimizers = [optimizer.state_dict() for optimizer in comm.optimizers]
    tree = {"model": comm.model.state_dict(), "optimizer": optimizers, "extra": dict(extra or {})}
    tensors = dict[str, Tensor]()
    tensors["frame"] = _packed(_cleared(tree, "", tensors))
    sums = {name: _sum(t) for name, t in tensors.items()}
    everyone = _told(comm, {"step": comm.step, "sums": sums, "taken": (Path(path) / ".metadata").exists()})
    _check_together(everyone, path)
    equal = {name for name in sums if all(other["sums"].get(name) == sums[name] for other in everyone)}
    model = _consensus(
        comm, {name.removeprefix("model/"): tensors[name] for name in equal if name.startswith("model/")}
    )
    own: dict[str, Any] = {f"rank{comm.rank}/{name}": t for name, t in tensors.items() if name not in equal}
    if comm.rank == 0:
        own |= {f"equal/{name}": tensors[name] for name in equal if not name.startswith("model/")}
        sums |= {f"consensus/{name}": _sum(t) for name, t in model.items()}
    own[f"rank{comm.rank}/contents"] = json.dumps(sums)
    _write(comm, path, {"comm": state, "own": own} | ({"model": model} if comm.rank == 0 else {}))


def load(comm: Communicator, path: str | Path, key: str = "comm") -> dict[str, Any]:
    """Go on where `save` was called, also with another number of ranks; returns what was saved as `extra`.

    Attach first; all ranks call it together, and if it fails on one it fails on all. With other ranks all start from the
    consensus, and from the mean of the optimizers' states. Of what `dcp.save({"comm": comm, ...}, checkpoint_id=path)`
    wrote it loads the communicator alone. Nothing that a checkpoint holds is run.
    """
    state, tree, problem = dict[str, Any](), dict[str, Any](), ""
    try:
        folder = Folder(path)
        state = _communicator(folder, f"{key}.", comm)
        tree = _Run(folder, comm, int(state["size"])).tree() if "own.rank0/contents" in folder else {}
        _check_model(comm, tree)
    except CheckpointError as error:
        problem = str(error)
    for rank, told in enumerate(_told(comm, {"problem": problem[:2000]})):
        if problem or told["problem"]:
            raise CheckpointError(problem or f"rank {rank}: {told['problem']}")
    comm.load_state_dict(state)
    if tree:
        _put(comm, tree)
    return tree.get("extra", {})


# -- saving --------------------------------------------------------------------------------------------------------


def _cleared(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The same tree with names for its tensors, which are put aside."""
    if isinstance(tree, Tensor):
        tensors[name] = tree.detach()
        return {PLACE: name}
    if isinstance(tree, Mapping):
        return {k: _cleared(v, f"{name}/{k}" if name else str(k), tensors) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_cleared(v, f"{name}/{i}", tensors) for i, v in enumerate(tree))
    return tree


def _packed(value: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _sum(tensor: Tensor) -> str:
    """So long that tensors which differ are never taken for equal."""
    raw = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)} {blake2b(raw.numpy().data, digest_size=16).hexdigest()}"


def _told(comm: Communicator, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank has to say."""
    if comm.size == 1:
        return [facts]
    device = next(iter(comm.worker.named.values())).device
    wire = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8).to(device)
    return [json.loads(bytes(w.tolist())) for w in comm.fabric.run(all_gather_ragged(wire, LIMIT))]


def _check_together(everyone: list[dict[str, Any]], path: str | Path) -> None:
    steps = [told["step"] for told in everyone]
    if len(set(steps)) > 1:
        raise CheckpointError(f"the ranks are at steps {steps}; save when all of them are at the same one")
    if any(told["taken"] for told in everyone):
        raise CheckpointError(
            f"{path} holds a checkpoint already; give each a folder of its own, such as step{steps[0]}"
        )


def _consensus(comm: Communicator, equal: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's tensors as all ranks agree on them; those that are equal anyway are left as they are."""
    own = {name: t for name, t in comm.model.state_dict().items() if isinstance(t, Tensor)}
    if own.keys() == equal.keys():
        return own
    with comm.consensus():
        agreed = comm.model.state_dict()
        return {name: equal[name] if name in equal else agreed[name].detach().clone() for name in own}


def _write(comm: Communicator, path: str | Path, entries: dict[str, Any]) -> None:
    # Here, since torch takes half a second to import them, and every command would wait for it.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as write

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of a process alone
            write(entries, checkpoint_id=str(path), process_group=comm.fabric._group)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(
            f"rank {rank} cannot write to {path}: {plainly(cause)}; there is no new checkpoint"
        ) from None
    except RuntimeError as error:
        raise PeerError(f"{path} was not finished, other ranks are gone: {plainly(error)}") from None


# -- loading -------------------------------------------------------------------------------------------------------


def _communicator(folder: Folder, prefix: str, comm: Communicator) -> dict[str, Any]:
    names = [n for n in folder if n.startswith(prefix)]
    if not names:
        held = sorted({n.split(".")[0] for n in folder})
        raise CheckpointError(f"{folder.path} holds nothing under {prefix[:-1]!r}; it was saved under {held}")
    size = folder.read(f"{prefix}size") if f"{prefix}size" in folder else None
    if not isinstance(size, int):
        raise CheckpointError(
            f"{folder.path} is damaged, or no communicator lies under {prefix[:-1]!r}: it has no size"
        )
    if size == comm.size:  # then the others' need not be read
        others = tuple(f"{prefix}rank{r}/" for r in range(size) if r != comm.rank)
        names = [n for n in names if not n.startswith(others)]
    return {n.removeprefix(prefix): folder.read(n) for n in names}


class _Run:
    """What `save` stored beside the communicator, as one rank needs it now."""

    def __init__(self, folder: Folder, comm: Communicator, size: int) -> None:
        if f"own.rank{size - 1}/contents" not in folder:
            raise CheckpointError(f"{folder.path} is damaged: it does not hold all of its {size} ranks")
        self._folder, self._moved = folder, size != comm.size
        self._ranks = list(range(size)) if self._moved else [comm.rank]
        self._sums = {rank: self._contents(rank) for rank in self._ranks}

    def tree(self) -> dict[str, Any]:
        with io.BytesIO(self._tensor("frame").numpy().tobytes()) as file:
            return self._filled(torch.load(file, weights_only=True))

    def _filled(self, tree: Any) -> Any:
        if isinstance(tree, dict) and tree.keys() == {PLACE}:
            return self._tensor(tree[PLACE])
        if isinstance(tree, dict):
            return {k: self._filled(v) for k, v in tree.items()}
        return type(tree)(map(self._filled, tree)) if type(tree) in (list, tuple) else tree

    def _tensor(self, name: str) -> Tensor:
        first = self._ranks[0]
        if f"own.rank{first}/{name}" not in self._folder:
            home = f"model.{name.removeprefix('model/')}" if name.startswith("model/") else f"own.equal/{name}"
            return self._checked(home, first, name)
        if self._moved and name.startswith("model/"):
            inner = name.removeprefix("model/")
            return self._checked(f"model.{inner}", 0, f"consensus/{inner}")
        if self._moved and name.startswith("optimizer/"):
            return self._mean(name)
        return self._checked(f"own.rank{first}/{name}", first, name)

    def _mean(self, name: str) -> Tensor:
        """Of all old ranks; what is counted, and what not all of them have, is taken from the first."""
        held = [self._checked(f"own.rank{r}/{name}", r, name) for r in self._ranks if name in self._sums[r]]
        first = held[0]
        if len(held) < len(self._ranks) or not first.is_floating_point() or any(t.shape != first.shape for t in held):
            return first
        return torch.stack([t.double() for t in held]).mean(0).to(first.dtype)

    def _contents(self, rank: int) -> dict[str, str]:
        try:
            sums = json.loads(self._folder.read(f"own.rank{rank}/contents"))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self._folder.path} is damaged: rank {rank}'s contents: {error}") from None
        return sums

    def _checked(self, home: str, rank: int, name: str) -> Tensor:
        if home not in self._folder:
            raise CheckpointError(f"{self._folder.path} is damaged: {home!r} is missing")
        tensor = self._folder.read(home)
        if not isinstance(tensor, Tensor) or _sum(tensor) != self._sums[rank].get(name):
            raise CheckpointError(f"{self._folder.path} is damaged: {home!r} is not what rank {rank} saved")
        return tensor


def _check_model(comm: Communicator, tree: Mapping[str, Any]) -> None:
    """Before anything changes: names and shapes."""
    if not tree:
        return
    now, then = comm.model.state_dict(), tree["model"]
    for name in {**now, **then}:
        if name not in then or name not in now:
            where = "the checkpoint" if name not in then else "this model"
            raise CheckpointError(f"the checkpoint is of another model: {name!r} is missing in {where}")
        if getattr(now[name], "shape", None) != getattr(then[name], "shape", None):
            raise CheckpointError(
                f"the checkpoint is of another model: {name!r} was {list(then[name].shape)}, and is {list(now[name].shape)} now"
            )


def _put(comm: Communicator, tree: Mapping[str, Any]) -> None:
    current = comm.model.state_dict()
    current.update(tree["model"])
    comm.model.load_state_dict(current)
    try:
        for optimizer, state in zip(comm.optimizers, tree["optimizer"], strict=True):
            optimizer.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint's optimizer does not fit this one: {plainly(error)}") from None
