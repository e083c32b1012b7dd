"""Django's settings, of which a process has one: the same for all tests, whichever comes first."""

from __future__ import annotations


def configure() -> None:
    """Configure Django, unless another test has done so. Its database is set by the test that uses it."""
    import django
    from django.conf import settings

    if not settings.configured:
        settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}})
        django.setup()
