"""Runs on the nodes of somebody else's cluster: a head beside whoever asks for the run, an agent on each node.

The *head* keeps the state and says who is a worker; it computes nothing itself. An *agent* joins it with the workers of
its node. Both are processes of our own, started by processes of the cluster (an actor, a task, the driver) with which
they end. Where agents are, and that others are placed when some are lost, is the cluster's to say.
"""
