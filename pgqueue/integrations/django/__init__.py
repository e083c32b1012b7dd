"""pgqueue in a Django project: `INSTALLED_APPS += ["pgqueue.integrations.django"]`.

`apps` starts it in each process of the project. `databases` turns an alias of DATABASES into a DSN. `worker` is the
module that `manage.py pgqueue work` gives to its workers. docs/django.md is its page.
"""
