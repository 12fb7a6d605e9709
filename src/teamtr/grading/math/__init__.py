"""Grading answers to problems of mathematics."""
