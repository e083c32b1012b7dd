"""One worker process: fetch, run, complete, and what stands beside that flow."""
