"""What rewrites are made of: patterns, their contract, edits, affine algebra, the pipeline."""
