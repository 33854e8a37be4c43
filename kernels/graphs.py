"""Pass over the graphs of torch.compile on CUDA that merges launches of a training step.

Two things only show in the graph of a whole backward. Each op with a bias leaves partial sums
of its gradient, and one launch can add up those of eight; and the gradient of a weight that is both
embedding and head would be zeros, to which the embedding's rows are added, plus the head's.
"""

from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten = torch.ops.aten


class Merged(CustomGraphPass):
    """Pass over each graph, after those of Inductor."""

    def __call__(self, graph: Graph) -> None:
        merge_sums(graph)
        add_to_head(graph)

    def uuid(self) -> Any:
        """Returns a hash of all kernels: compiled graphs in the cache call ops as they were."""
        return get_hash_for_files(tuple(map(str, sorted(Path(__file__).parent.rglob("*.py")))))


MERGED = Merged()
"""The one instance: blocks whose options differ would be compiled apart."""


def merge_sums(graph: Graph) -> None:
    """Gives one launch the partial sums of up to `MOST` matrices, when the last of them are there.

    Those of a whole backward would keep the partial sums of all layers in memory.
    """
    from .rows import MOST  # imports Triton

    group: list[Node] = []
    target = torch.ops.fastgpt.reduce_partials.default
    for call in graph.find_nodes(op="call_function", target=target):
        several = sum(len(_matrices(node)) for node in (*group, call)) > MOST
        if several or _needs(call, group):
            _merge(graph, group)
            group = []
        group.append(call)
    _merge(graph, group)


def _matrices(call: Node) -> list[Node]:
    parts, more = call.args
    return [parts, *more]  # pyright: ignore


def _needs(node: Node, others: list[Node]) -> bool:
    """Returns True if `node` is computed from any of the others."""
    seen, open_ = set(), [node]
    while open_:
        new = [it for it in open_.pop().all_input_nodes if it not in seen]
        seen.update(new)
        open_ += new
    return not seen.isdisjoint(others)


def _merge(graph: Graph, group: list[Node]) -> None:
    if len(group) < 2:
        return
    parts, *more = [matrix for call in group for matrix in _matrices(call)]
    with graph.inserting_after(group[-1]):
        merged = graph.call_function(group[-1].target, (parts, more))
    merged.meta["val"] = torch.cat([call.meta["val"] for call in group])
    first = 0
    for call in group:
        last = first + len(call.meta["val"])
        with graph.inserting_after(merged):
            view = graph.call_function(aten.slice.Tensor, (merged, 0, first, last))
        view.meta["val"] = merged.meta["val"][first:last]
        call.replace_all_uses_with(view)
        graph.erase_node(call)
        first = last


def add_to_head(graph: Graph) -> None:
    """Replaces x + (zeros, with rows added to some) by x, with rows added to some.

    That is a pass over the table less to fill it with zeros, and one less to read them.
    """
    scatter = aten._unsafe_masked_index_put_accumulate.default
    for rows in graph.find_nodes(op="call_function", target=scatter):
        zeros, *rest = rows.args
        if zeros.target is not aten.full.default or zeros.args[1] != 0 or len(rows.users) != 1:
            continue
        (user,) = rows.users
        x = next((it for it in user.args if it is not rows), None)
        is_sum = user.target is aten.add.Tensor and not user.kwargs and isinstance(x, Node)
        if not is_sum or _kind(x) != _kind(zeros):
            continue
        with graph.inserting_before(user):
            added = graph.call_function(scatter, (x, *rest))
        added.meta["val"] = user.meta["val"]
        user.replace_all_uses_with(added)
        graph.erase_node(user)
        graph.erase_node(rows)


def _kind(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.shape, value.dtype, value.device
