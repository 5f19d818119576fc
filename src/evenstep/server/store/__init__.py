"""The parameters of a server: values, versions, updates, and persistence. No transports and no requests."""
