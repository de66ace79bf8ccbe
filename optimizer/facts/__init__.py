"""What is known of a graph before it is rewritten.

What enters is a graph and example inputs; what leaves is a fact for each node: shape, dtype,
memory, whether it is written, and whose code it runs. It imports `core`.
"""
