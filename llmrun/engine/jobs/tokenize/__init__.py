"""The job `tokenize`."""
