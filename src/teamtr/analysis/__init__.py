"""Analysis of run folders: diagnostics, the report, and the paper's figures."""
