"""Words that every room shares: errors, inputs, devices, nodes, guards, copies, the report."""
