"""Fast sampling on a GPU: a paged KV cache, one captured graph per batch size, and weights merged in place."""
