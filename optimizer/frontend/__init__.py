"""From a module and a call to a graph with facts, and from a graph to the module returned."""
