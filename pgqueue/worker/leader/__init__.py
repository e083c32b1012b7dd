"""The duties of whichever worker leads: promotion, cron, pruning."""
