"""Whether two modules give the same answer, where they part, and which rewrite is to blame.

It imports the rooms before it, down to `passes`.
"""
