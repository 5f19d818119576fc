"""How requests reach a service: HTTP, raw sockets, shared memory. No decisions are made here."""
