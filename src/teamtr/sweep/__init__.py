"""Trains a team several times: over seeds, over settings, and for the tables of a paper.

``cells`` trains the runs concurrently and resumes where it was stopped; ``table`` makes one table and one page of them.
"""
