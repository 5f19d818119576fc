"""A soak: a training under faults, a durable server under load and kills, and process groups, all for a long time.

What only shows after an hour: memory, descriptors and threads that grow, updates that are lost, bits that differ.
Run it by `make soak`, or

    python -m evenstep.testing.soak --minutes 20 --seed 3
"""
