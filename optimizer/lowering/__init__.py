"""One call, for one device: as straight-line code, in regions that a library's kernels run.

What enters is a captured graph, a call of it and what the caller allows; what leaves is a module
that runs such calls by the plan that was right and fastest, and others by the portable code.
"""
