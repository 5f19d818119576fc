"""Pictures of plans: machines and the tree over them, a network and its partition; as text, SVG and HTML."""
