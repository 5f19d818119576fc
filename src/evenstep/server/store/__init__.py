"""The parameters of a server: values, versions, updates, and what survives. No transport and no request."""
