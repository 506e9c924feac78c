"""One plain function per asset: from spec, inputs, store and engine to a published artifact."""
