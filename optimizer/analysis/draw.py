"""A graph as a picture in the DOT language: `dot -Tsvg`, IDEs and notebooks lay it out.

Source: https://graphviz.org/doc/info/lang.html.
"""

from __future__ import annotations

from torch import fx

from optimizer.core.inputs import require_graph
from optimizer.core.node import describe, shape_text, source_of

_COLOURS = {
    "call_module": "#d3e4fd", "call_function": "#d9f0d9", "call_method": "#eedcf5",
    "get_attr": "#fdf0c4",
}  # fmt: skip
_MARKS = ('style="filled,dashed" color="#cc2222" penwidth=2', 'color="#117711" penwidth=2')
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_HEAD = 'node [shape=box style=filled fontname=monospace fontsize=10 color="#888888"]'


def draw(module: fx.GraphModule, after: fx.GraphModule | None = None) -> str:
    """The graph of a module as DOT text, alone or beside the graph that it became.

    Beside one another, nodes that only the first graph has are dashed, and those that only the
    second has are outlined in green. A box shows what is called, the node's name and its shape.

    Raises:
        InputError: an argument is no graph: pass `optimizer.capture(model)`.
    """
    modules = [module] if after is None else [module, after]
    graphs = [require_graph(each) for each in modules]
    names = [{node.name for node in graph.nodes} for graph in graphs]
    lines = ["digraph {", _HEAD]
    for place, graph in enumerate(graphs):
        title = f"{type(modules[place]).__name__}, {len(graph.nodes)} nodes"
        lines += [f"subgraph cluster_{place} {{", f"label={_quoted(title)}"]
        for node in graph.nodes:
            label = f"{describe(node)}\n{node.name} {shape_text(node)}".strip()
            told = f"{node.format_node()}  {source_of(node)}".strip()
            look = f'fillcolor="{_COLOURS.get(node.op, "#eeeeee")}"'
            look += "" if node.name in names[-1 - place] else f" {_MARKS[place]}"
            name = _quoted(f"{place}.{node.name}")
            lines.append(f"{name} [label={_quoted(label)} tooltip={_quoted(told)} {look}]")
            read = (_quoted(f"{place}.{each.name}") for each in node.all_input_nodes)
            lines += (f"{each} -> {name}" for each in read)
        lines.append("}")
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'
