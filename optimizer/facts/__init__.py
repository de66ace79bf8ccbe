"""What is known of a graph before it is rewritten.

What enters is a graph and example inputs; what leaves is a fact for each node.
"""
