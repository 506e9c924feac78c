"""Measurements; nothing here asserts on speed."""
