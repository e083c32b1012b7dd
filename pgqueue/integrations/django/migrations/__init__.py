"""The schema as migrations of Django, one for each release whose schema is newer. None of them ever changes."""
