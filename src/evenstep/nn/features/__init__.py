"""Layers cut into parts by their features: what a part is, who computes it, and how parts become one result again."""
