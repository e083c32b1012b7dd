"""What an application declares and calls."""
