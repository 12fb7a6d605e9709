"""Training a team more than once: over seeds, over settings, and for the tables of a paper.

``cells`` trains them side by side and goes on where it was stopped; ``table`` makes one table and one page of them.
"""
