"""Engines that sample, score and train: tabular (exact), torch (one process, CPU or GPU), clusters and vLLM servers."""
