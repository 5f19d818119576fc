"""Runs on the nodes of a foreign cluster (Ray, Spark): a head next to the caller, and an agent on each node.

The *head* keeps the state and decides who is a worker; it computes nothing itself. An *agent* joins it with the workers
of its node. Both are processes of our own, started by a process of the cluster (an actor, a task, the driver) and
ending with it. The cluster decides where agents run and replaces those that are lost.
"""
