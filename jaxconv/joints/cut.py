"""What a forward pass hands over: the fewest bytes from which the backward pass has all that it reads.

What is elementwise, or a view, may be made again where it is read. Which values to keep is then a minimum cut between
what cannot be made again and what is read, each value as wide as its bytes (as PyTorch's min-cut rematerialisation:
https://dev-discuss.pytorch.org/t/467). The algorithm is Dinic's (1970).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from jaxconv._core.graph import Constant, Node, Value

# Operations that are as well done again where their result is read: they cost no pass of their own.
AGAIN = frozenset(
    (
        *("abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "div", "eq"),
        *("erf", "erfc", "exp", "expand_dims", "expm1", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "log"),
        *(
            "log1p",
            "logistic",
            "lt",
            "max",
            "min",
            "mul",
            "ne",
            "neg",
            "not",
            "one_minus_square",
            "or",
            "pow",
            "reshape",
            "rsqrt",
        ),
        *("select_n", "sign", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh"),
        "jaxconv_gate",
    )
)


def size_of(v: Value) -> int:
    """Bytes; a symbolic extent counts as 1."""
    extents = (n if isinstance(n, int) else 1 for n in v.shape)
    return math.prod(extents) * getattr(v.dtype, "itemsize", 4)


def _again(v: Value, node: Node) -> bool:
    """Whether the node may make v again. What somebody gave a name is kept; an op's own name is no such name."""
    return node.name in AGAIN and node.call is None and set(v.labels) <= {node.name}


def fewest_bytes(
    nodes: Sequence[Node], inputs: Sequence[Value], read: Sequence[Value]
) -> tuple[list[Value], list[Node]]:
    """The values to keep, and the nodes that make the others again. Inputs are there anyway, and cost nothing."""
    given = set(inputs)
    cone: dict[Value, bool] = {}  # whether a value may be made again
    front = list(read)
    while front:
        v = front.pop()
        if v in cone or isinstance(v, Constant):
            continue
        cone[v] = again = v.node is not None and _again(v, v.node)
        front += v.node.inputs if again else ()
    flow = _Flow()
    source, sink = flow.vertex(), flow.vertex()
    ends = {v: (flow.vertex(), flow.vertex()) for v in cone}
    for v, again in cone.items():
        enters, leaves = ends[v]
        flow.edge(enters, leaves, 0 if v in given else 1 + size_of(v))
        if not again:
            flow.edge(source, enters, math.inf)
        for u in v.node.inputs if again else ():
            if not isinstance(u, Constant):
                flow.edge(ends[u][1], enters, math.inf)
    for v in read:
        flow.edge(ends[v][1], sink, math.inf)
    below = flow.reaches_behind_the_least_cut(source, sink)
    kept = [v for v in _in_order(nodes, inputs) if v in ends and ends[v][0] not in below and ends[v][1] in below]
    there, made = set(kept), dict[Node, None]()
    front = [v for v in read if v not in there]
    while front:
        v = front.pop()
        if v in there or isinstance(v, Constant) or v.node in made:
            continue
        assert v.node is not None, "the cut leaves a value that nothing makes"
        made[v.node] = None
        front += v.node.inputs
    return kept, list(made)


def _in_order(nodes: Sequence[Node], inputs: Sequence[Value]) -> list[Value]:
    return [*inputs, *(v for node in nodes for v in node.outputs)]


class _Flow:
    """A network of vertices and edges with capacities."""

    def __init__(self) -> None:
        self._edges: list[list[int]] = []  # of each vertex, the numbers of its edges; edge i ^ 1 is edge i reversed
        self._to: list[int] = []
        self._room: list[float] = []

    def vertex(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, a: int, b: int, capacity: float) -> None:
        for start, end, room in ((a, b, capacity), (b, a, 0)):
            self._edges[start].append(len(self._to))
            self._to.append(end)
            self._room.append(room)

    def reaches_behind_the_least_cut(self, source: int, sink: int) -> set[int]:
        """The vertices behind the minimum cut that is nearest to the sink."""
        while (level := self._levels(source, sink)) is not None:
            tried = [0] * len(self._edges)
            while self._push(source, sink, level, tried):
                pass
        behind, front = {sink}, [sink]
        while front:
            for i in self._edges[front.pop()]:
                if self._room[i ^ 1] > 0 and self._to[i] not in behind:
                    behind.add(self._to[i])
                    front.append(self._to[i])
        return behind

    def _levels(self, source: int, sink: int) -> list[int] | None:
        level = [-1] * len(self._edges)
        level[source] = 0
        queue = collections.deque([source])
        while queue:
            a = queue.popleft()
            for i in self._edges[a]:
                if self._room[i] > 0 and level[self._to[i]] < 0:
                    level[self._to[i]] = level[a] + 1
                    queue.append(self._to[i])
        return level if level[sink] >= 0 else None

    def _push(self, source: int, sink: int, level: list[int], tried: list[int]) -> bool:
        """Along one path of rising levels, without recursion."""
        path: list[int] = []
        at = source
        while at != sink:
            edges = self._edges[at]
            while tried[at] < len(edges):
                i = edges[tried[at]]
                if self._room[i] > 0 and level[self._to[i]] == level[at] + 1:
                    break
                tried[at] += 1
            if tried[at] == len(edges):
                if at == source:
                    return False
                at = self._to[path.pop() ^ 1]
                tried[at] += 1
                continue
            path.append(edges[tried[at]])
            at = self._to[path[-1]]
        least = min(self._room[i] for i in path)
        assert least < math.inf, "what cannot be made again is read where it cannot be kept"
        for i in path:
            self._room[i] -= least
            self._room[i ^ 1] += least
        return True
