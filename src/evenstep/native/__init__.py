"""The C core: futex waits, posts and collects over shared memory, and the tree sum (see core.h)."""
