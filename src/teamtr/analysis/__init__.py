"""What a run folder tells afterwards: diagnostics, the report and its page, the paper's figures."""
