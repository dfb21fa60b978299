"""The recipes that a plan compares unless it is told others."""

LINE_UP = (
    "bf16",
    "int8",
    "qsgd",
    "terngrad",
    "topk",
    "powersgd",
    "diana",
    "ef21",
    "allreduce + delayed()",
    "local_sgd(8)",
    "local_sgd(32)",
    "slowmo(32)",
    "scatter(qsgd()) + local_sgd(8)",
    "scatter(qsgd()) + local_sgd(32)",
    "diloco(32)",
    "streaming_diloco(32)",
    "overlap_local_sgd(8)",
    "sgp",
    "osgp",
    "osgp(every=4)",
    "backup",
)
"""One of each family of methods, and rounds of 8 and of 32 steps."""


def line_up(ranks_per_node: int) -> list[str]:
    """The recipes to plan; where ranks share a node, in two levels, and some flat ones to show what that costs.

    >>> line_up(8)[:2]
    ['bf16 + per_node(8)', 'int8 + per_node(8)']
    """
    if ranks_per_node == 1:
        return list(LINE_UP)
    flat = ("bf16", "qsgd", "topk", "local_sgd(32)")
    return [f"{name} + per_node({ranks_per_node})" for name in LINE_UP] + list(flat)
