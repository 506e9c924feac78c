"""A Dagster code location that turns conversations and a verifier LLM into an EAGLE-3 draft model."""

__version__ = "0.1.0"
