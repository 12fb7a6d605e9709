"""PlanBench: Blocksworld in words, and the judge of plans."""
