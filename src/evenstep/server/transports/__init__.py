"""How requests reach a service: HTTP, raw sockets, shared memory. Nothing is decided here."""
