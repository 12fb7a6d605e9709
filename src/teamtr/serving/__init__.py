"""A team behind an API that every client speaks: routed turns inside, one answer outside."""
