"""The soak: a training under faults, a durable server under load and kills, and process groups, all for a long time.

It finds what only shows after an hour: growing memory, descriptors and threads, lost updates, differing bits.
Run it by `make soak`, or

    python -m evenstep.testing.soak --minutes 20 --seed 3
"""
