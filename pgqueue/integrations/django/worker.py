"""The module that a worker of a Django project imports: it sets Django up, which imports the `tasks.py` of every app.

`manage.py pgqueue work` names it by itself. `pgqueue work pgqueue.integrations.django.worker` does the same with
DJANGO_SETTINGS_MODULE in the environment.
"""

from __future__ import annotations

import django
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

django.setup()
if not apps.is_installed("pgqueue.integrations.django"):
    raise ImproperlyConfigured('INSTALLED_APPS lacks "pgqueue.integrations.django"')
