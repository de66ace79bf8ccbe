"""One call, for one device: as straight-line code, in regions that a library's kernels run."""
