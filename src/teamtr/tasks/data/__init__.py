"""Your own data: rows, splits, overlap, stored replies."""
