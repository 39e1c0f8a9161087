"""A tree of paths in which each node is one pass, as in the graphs of torch.fx."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from torch import nn

from bendtrace.paths.naming import identifier
from bendtrace.paths.nodes import NodePath, TreeNode, Variant, passes_in
from bendtrace.paths.view import Tree
from bendtrace.torch_rules.owners import modules_in


def unrolled(tree: Tree, model: Any) -> Tree:
    """Return a tree in which each node is one pass, numbered in the order of the run.

    Each node keeps the path of its pass in the given tree.

    Args:
        tree: the tree of a run.
        model: the model.
    """
    tree.place_steps()
    return Tree(_one_pass(tree.data, 0, "", modules_in(model)), tree._elements)


def _one_pass(node: TreeNode, number: int, name: str, modules: dict[str, nn.Module]) -> TreeNode:
    """Return one pass of a node, with a child for each pass that its children had in it.

    Graphs of graphpatch number what they repeat in the order of a run. The path is that of the pass
    in the given tree.

    Args:
        node: the node.
        number: the pass.
        name: its new name.
        modules: the modules of the model by qualified name.
    """
    several = len(node.passes) > 1
    path = NodePath(f"{node.path}:{number + 1}") if several else node.path
    code = [Variant(one.text, (0,)) for one in node.code if number in one.passes]
    made = replace(
        node, name=name, label="", children={}, passes=[replace(node.passes[number], parent=0)],
        code=code, steps=[] if several else node.steps, path=path, spellings=None,
    )  # fmt: skip
    inside = [(c, n) for c in node.children.values() for n in passes_in(c, [number]) or ()]
    numbered = [(c, n) for c, n in inside if node.kind == "graph" and c.role in ("call", "op")]
    are_numbered = set(numbered)
    taken = {one[0].name for one in inside if one not in are_numbered}
    calls = Counter(child.module for child, _ in numbered if child.role == "call")
    if len({id(child) for child, _ in numbered}) < len(numbered):
        numbered.sort(key=lambda one: _began(*one))
    waiting = iter(numbered)
    for child, n in inside:
        child, n = next(waiting) if (child, n) in are_numbered else (child, n)
        new, label, key = child.name, "", child.key
        if (child, n) in are_numbered:
            base, count = identifier(child.label or child.name), 0
            if calls[child.module] > 1:
                module = modules.get(child.module)
                if sum(other is module for other in modules.values()) > 1:
                    base, key = f"{base}_call", None  # no call shows by which name it was made
                elif base not in taken:
                    label = f"{base}_0"
            new = base
            while new in taken:
                count += 1
                new = f"{base}_{count}"
            taken.add(new)
        made.children[new] = replace(_one_pass(child, n, new, modules), label=label, key=key)
    return made


def _began(node: TreeNode, number: int) -> float:
    """Return where on the tape a pass of a node began; after its input, if it has no ops."""
    index = node.passes[number].index
    if not node.children:
        return -1 if index is None else index
    inside = [(c, n) for c in node.children.values() for n in passes_in(c, [number]) or ()]
    ops = [_began(*one) for one in inside if node.kind != "graph" or one[0].role in ("call", "op")]
    given = (_began(*one) + 0.5 for one in inside if one[0].role == "input")
    return min(ops, default=max(given, default=-1))
