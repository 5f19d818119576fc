"""Starting and watching the workers of one machine, or of several."""
