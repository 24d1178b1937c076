"""Golden tests: requests, llama-server's recorded answers to them, and what may differ here."""
