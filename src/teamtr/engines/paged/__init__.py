"""Fast sampling on a GPU: pages of keys and values, one captured graph per batch size, weights merged in place."""
