"""The parameter server: parameters with versions, kept by one process and trained by many."""
