"""Compare two modules, find where they diverge, and which rewrite is to blame.

It imports the rooms before it, down to `passes`.
"""
