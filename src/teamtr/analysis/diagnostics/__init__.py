"""Diagnostics of a team beyond its reward."""
