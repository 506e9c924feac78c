"""What a verifier is, asked of its class in Transformers: config, tensors of the head, how logits are made."""
