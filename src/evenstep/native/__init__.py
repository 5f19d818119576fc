"""The C core: futex waits, posts and collects, tree sums and collectives over shared memory."""
