"""How bytes move between the workers of one machine: the shared segment."""
