"""Serves a team through an OpenAI-compatible API: routed turns inside, one answer outside."""
