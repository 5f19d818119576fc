"""What travels between clients and servers, as both see it."""
