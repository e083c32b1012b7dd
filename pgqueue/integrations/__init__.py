"""What pgqueue has for frameworks. A module here imports its own framework at most; nothing else of pgqueue does."""
