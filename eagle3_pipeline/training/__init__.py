"""Training of a draft: runs in a worker process, `python -m eagle3_pipeline.training.worker SPEC.json`."""
