"""Engine that samples with vLLM servers. Everything else is computed by the engine that trains."""
