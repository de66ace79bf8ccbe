"""Ninety-five ways to get a graph rewrite wrong, each a model here or a test elsewhere."""
