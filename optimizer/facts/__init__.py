"""What is known of a graph before it is rewritten: a fact for each node."""
