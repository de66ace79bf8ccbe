"""From a module and a call of it to a graph, and from a graph to the module that is returned.

What enters is the caller's module, which is left as it is; what leaves is a copy of it as an
`fx.GraphModule` with facts, or the reason why not.
"""
