"""The `broadsheet` command: the one place that puts everything together. Each part is imported on first use."""
