"""Shapes of well-known models, by name, so that they can be planned without being built."""

from collections.abc import Callable, Mapping

from gossamer.core.errors import CostError
from gossamer.core.parts import nearest
from gossamer.costs.laws import FORWARD
from gossamer.planning.model_cost import ModelCost, guessed_shares

Shapes = Mapping[str, tuple[int, ...]]


def gpt2(layers: int, width: int) -> dict[str, tuple[int, ...]]:
    """A GPT-2 with tied embeddings."""
    shapes: dict[str, tuple[int, ...]] = {"wte": (50257, width), "wpe": (1024, width)}
    for i in range(layers):
        shapes |= {f"h.{i}.ln_1.{w}": (width,) for w in ("weight", "bias")}
        shapes |= {f"h.{i}.attn.c_attn.weight": (width, 3 * width), f"h.{i}.attn.c_attn.bias": (3 * width,)}
        shapes |= {f"h.{i}.attn.c_proj.weight": (width, width), f"h.{i}.attn.c_proj.bias": (width,)}
        shapes |= {f"h.{i}.ln_2.{w}": (width,) for w in ("weight", "bias")}
        shapes |= {f"h.{i}.mlp.c_fc.weight": (width, 4 * width), f"h.{i}.mlp.c_fc.bias": (4 * width,)}
        shapes |= {f"h.{i}.mlp.c_proj.weight": (4 * width, width), f"h.{i}.mlp.c_proj.bias": (width,)}
    return shapes | {f"ln_f.{w}": (width,) for w in ("weight", "bias")}


def bert(layers: int, width: int) -> dict[str, tuple[int, ...]]:
    """A BERT encoder with its pooler."""
    tables = {"word": 30522, "position": 512, "token_type": 2}
    shapes: dict[str, tuple[int, ...]] = {f"embeddings.{n}": (rows, width) for n, rows in tables.items()}
    shapes |= {f"embeddings.norm.{w}": (width,) for w in ("weight", "bias")}
    for i in range(layers):
        for name in ("query", "key", "value", "attention.output"):
            shapes |= {f"{i}.{name}.weight": (width, width), f"{i}.{name}.bias": (width,)}
        shapes |= {f"{i}.intermediate.weight": (4 * width, width), f"{i}.intermediate.bias": (4 * width,)}
        shapes |= {f"{i}.output.weight": (width, 4 * width), f"{i}.output.bias": (width,)}
        shapes |= {f"{i}.norm.{n}.{w}": (width,) for n in (1, 2) for w in ("weight", "bias")}
    return shapes | {"pooler.weight": (width, width), "pooler.bias": (width,)}


def llama(
    layers: int, width: int, hidden: int, vocabulary: int = 32000, shared: int = 1, tied: bool = False
) -> dict[str, tuple[int, ...]]:
    """A LLaMA; `shared` query heads use one key and one value head."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (vocabulary, width)}
    for i in range(layers):
        narrow = width // shared
        shapes |= {f"layers.{i}.{n}_proj": (rows, width) for n, rows in (("q", width), ("k", narrow), ("v", narrow))}
        shapes |= {f"layers.{i}.o_proj": (width, width), f"layers.{i}.down_proj": (width, hidden)}
        shapes |= {f"layers.{i}.{n}_proj": (hidden, width) for n in ("gate", "up")}
        shapes |= {f"layers.{i}.norm_{n}": (width,) for n in (1, 2)}
    shapes["norm"] = (width,)
    return shapes if tied else shapes | {"lm_head": (vocabulary, width)}


def resnet(*blocks_of_stages: int) -> dict[str, tuple[int, ...]]:
    """A ResNet of bottleneck blocks for 1,000 classes."""
    shapes: dict[str, tuple[int, ...]] = {"conv1": (64, 3, 7, 7), "bn1.weight": (64,), "bn1.bias": (64,)}
    before = 64
    for stage, (blocks, width) in enumerate(zip(blocks_of_stages, (64, 128, 256, 512), strict=True), 1):
        for b in range(blocks):
            name, out = f"layer{stage}.{b}", 4 * width
            kernels = {"conv1": (width, before, 1, 1), "conv2": (width, width, 3, 3), "conv3": (out, width, 1, 1)}
            if b == 0:
                kernels["downsample"] = (out, before, 1, 1)
            for conv, shape in kernels.items():
                shapes[f"{name}.{conv}"] = shape
                shapes |= {f"{name}.{conv}.bn.{w}": (shape[0],) for w in ("weight", "bias")}
            before = out
    return shapes | {"fc.weight": (1000, 2048), "fc.bias": (1000,)}


MODELS: Mapping[str, Callable[[], Shapes]] = {
    "resnet50": lambda: resnet(3, 4, 6, 3),
    "resnet101": lambda: resnet(3, 4, 23, 3),
    "bert-base": lambda: bert(12, 768),
    "gpt2": lambda: gpt2(12, 768),
    "gpt2-xl": lambda: gpt2(48, 1600),
    "llama-1b": lambda: llama(16, 2048, 8192, 128256, shared=4, tied=True),
    "llama-7b": lambda: llama(32, 4096, 11008),
}


def known_model(name: str, step: float, *, memory_rate: float = 600e9, dtype: str = "fp32") -> ModelCost:
    """The cost of a known model whose step takes `step` seconds on one rank alone: a third is forward, as is usual.

    >>> known_model("gpt2", 0.35).numel
    124439808
    """
    if name not in MODELS:
        raise CostError(f"there is no model called {name!r}. {nearest(name, list(MODELS))}")
    return from_shapes(MODELS[name](), step, name=name, memory_rate=memory_rate, dtype=dtype)


def from_shapes(
    shapes: Shapes, step: float, *, name: str, memory_rate: float, momenta: int = 2, dtype: str = "fp32"
) -> ModelCost:
    """The cost of a model of these shapes whose step takes `step` seconds; the optimizer's part is its passes over memory."""
    ours = ModelCost(shapes=shapes, forward=0, backward=0, optimizer=0, shares={}).of_dtype(dtype)
    optimizer = min((3 + 2 * momenta) * ours.bytes / memory_rate, step / 4)
    return ModelCost(
        shapes=shapes,
        forward=FORWARD * (step - optimizer),
        backward=(1 - FORWARD) * (step - optimizer),
        optimizer=optimizer,
        shares=guessed_shares(shapes),
        momenta=momenta,
        dtype=dtype,
        name=name,
        source="the step's seconds as given, a third of them forward; gradients in reverse order, by size",
    )
