"""What pgqueue has for web frameworks. Each package here imports its own framework; nothing else of pgqueue does."""
