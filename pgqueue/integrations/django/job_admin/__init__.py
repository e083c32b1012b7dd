"""Jobs in Django's admin: `INSTALLED_APPS += ["pgqueue.integrations.django.job_admin"]`, beside pgqueue's own app.

An app of its own: it needs the admin, and has the permissions that say which user may do what to jobs, also on the
dashboard.
"""
