"""Exact experiments on teams small enough to solve: nothing here is sampled unless it says so.

checks       what a check is, and what it is given
verify       every check of the paper's and our statements over random teams
team_checks  the statements about teams: occupancy, certificates, token KL
"""
