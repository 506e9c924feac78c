"""What this project does on one GPU, beside the usual tools in the same run."""
