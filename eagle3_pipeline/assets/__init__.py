"""Dagster assets: each resolves its pipeline, calls one stage function and attaches metadata."""
