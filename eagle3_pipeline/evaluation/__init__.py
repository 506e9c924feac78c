"""What a draft is worth where it is used: acceptance, speed, and the report."""
