"""Compare two modules, find where they diverge, and which rewrite is to blame."""
