"""Content-addressed artifacts: atomic, verified, shared by all pipelines."""
