"""What Transformers says of verifiers, and how their tensors are found."""
