"""The job `embed`."""
