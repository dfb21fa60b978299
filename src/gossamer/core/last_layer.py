"""Which of a model's parameters are those of its last layer, by their names and shapes."""

from collections.abc import Mapping


def last_layer(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The parameters of the module that holds the last matrix; of the last module, if there is no matrix.

    >>> last_layer({"body.weight": (2, 2), "norm.weight": (2,), "head.weight": (3, 2), "head.bias": (3,), "scale": ()})
    ['head.weight', 'head.bias']
    """
    names = [*shapes]
    last = next((n for n in reversed(names) if len(shapes[n]) > 1 and 0 not in shapes[n]), names[-1])
    module = last.rpartition(".")[0]
    return [n for n in names if n.rpartition(".")[0] == module] if module else [last]
