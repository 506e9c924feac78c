"""Days in the life of an instance: a real `dagster dev`, its daemon, its schedules."""
