"""Words that every room shares: errors, inputs, devices, nodes, guards, copies, the report.

It imports no other room.
"""
