"""What travels between clients and servers, shared by both."""
