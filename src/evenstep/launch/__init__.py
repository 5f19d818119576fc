"""Starting and watching the workers of one machine."""
