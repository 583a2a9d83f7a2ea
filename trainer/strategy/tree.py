"""A binary tree of sums: the same additions in the same order, whoever makes them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Node(NamedTuple):
    """A sum of leaves: from number x 2**level to (number + 1) x 2**level."""

    level: int
    number: int


class Tree:
    """Sums nodes that come from left to right; two that are siblings become their parent.

    A binary counter: at most log2(leaves) vectors are kept.
    """

    def __init__(self) -> None:
        self._nodes: list[tuple[Node, torch.Tensor]] = []

    def add(self, node: Node, vector: torch.Tensor) -> None:
        """Take over a node to the right of all that came before; `vector` may be added to."""
        while node.number % 2 and self._nodes:
            before, left = self._nodes[-1]
            if before != (node.level, node.number - 1):
                break
            self._nodes.pop()
            vector = left.add_(vector)
            node = Node(node.level + 1, node.number // 2)
        self._nodes.append((node, vector))

    def nodes(self) -> list[Node]:
        return [node for node, _ in self._nodes]

    def vectors(self) -> list[torch.Tensor]:
        return [vector for _, vector in self._nodes]

    def root(self) -> torch.Tensor:
        """The sum of all, once every leaf has come: a node without a sibling is its parent."""
        while len(self._nodes) > 1:
            node, vector = self._nodes.pop()
            self.add(
                Node(node.level + 1, node.number // 2) if not node.number % 2 else node, vector
            )
        return self._nodes[0][1]


def nodes_of(first: int, last: int) -> list[Node]:
    """The largest nodes that make up the leaves from `first` to `last`."""
    nodes = []
    while first < last:
        level = 0
        while first % 2 ** (level + 1) == 0 and first + 2 ** (level + 1) <= last:
            level += 1
        nodes.append(Node(level, first >> level))
        first += 2**level
    return nodes
