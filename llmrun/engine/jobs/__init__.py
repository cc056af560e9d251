"""The engine's jobs besides answering: one module a job, named as in protocol/jobs, with run(); helpers beside it."""
