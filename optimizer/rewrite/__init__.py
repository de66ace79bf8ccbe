"""What rewrites are made of: patterns, their contract, edits, affine algebra, the pipeline.

What enters is a captured graph; what leaves is the same graph, rewritten, with an account of what
was done and refused. It imports `core`, `facts` and `frontend`.
"""
