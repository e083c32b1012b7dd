"""Jobs that wait for jobs: what goes on with them."""
