"""Exact experiments on teams small enough to solve; nothing is sampled unless a module says so.

checks       what a check is, and its input
verify       every check of the paper's statements and ours over random teams
team_checks  the statements about teams: occupancy, certificates, token KL
"""
