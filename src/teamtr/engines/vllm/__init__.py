"""Messages sampled by vLLM servers; everything else is computed by the engine that trains."""
