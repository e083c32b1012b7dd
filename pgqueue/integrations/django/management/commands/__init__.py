"""`manage.py pgqueue`."""
