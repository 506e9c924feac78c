"""Several GPUs of one host: leases, tensor-parallel capture, engines side by side, training. Asserts parity only."""
