"""From source rows to training sequences and the draft vocabulary."""
