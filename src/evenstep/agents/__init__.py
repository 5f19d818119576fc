"""Runs on the nodes of somebody else's cluster: what a node runs, and what comes of it.

A *node* is a warm process that forks workers; an *agent* is what a cluster's own process (an actor, a task) has of it.
Where workers are, and who goes on when some are lost, is the cluster's to say.
"""
