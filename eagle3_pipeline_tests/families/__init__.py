"""Tiny models of many verifier families, and the table of what is seen to work with them."""
