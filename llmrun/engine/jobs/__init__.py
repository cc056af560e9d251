"""What the engine does besides answering, one package for each job."""
