"""The pages of jobs in Django's admin: they read, and cancel, retry and discard for users with the permission.

Nothing is counted. A page asks as `pgqueue.find` does: it looks at 20,000 jobs at most, however many there are, and the
next page goes on there. Secrets among arguments and in errors are hidden as on the dashboard. A change is recorded with
the user's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse

import pgqueue
from pgqueue.admin.answers import WORDS
from pgqueue.admin.queries import SEARCHED_MOST, JobInfo, search
from pgqueue.integrations.django import project_settings
from pgqueue.integrations.django.job_admin.models import Job
from pgqueue.jobs.states import ASKED
from pgqueue.jobs.values import digits
from pgqueue.web.redaction import Redaction

SHOWN = 50
ROOM = 1 << 20
"""So many bytes of arguments and results a list reads: it shows none, but must know them to hide them in errors."""
_redaction = Redaction()
FILTERS = ("state", "queue", "task")
ACTIONS: dict[str, Callable[..., list[Any]]] = {
    "cancel": pgqueue.cancel,
    "retry": pgqueue.retry,
    "discard": pgqueue.discard,
}


@admin.register(Job)
class JobAdmin(admin.ModelAdmin):  # type: ignore[misc]  # Django has no types
    """Two pages: the list of jobs, and one job."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """No job is made here: the dashboard has a form for that."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """No job is edited."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Jobs are discarded, which is an action."""
        return False

    def get_urls(self) -> list[Any]:
        """The pages, by the names that the admin's own links have."""
        view = self.admin_site.admin_view
        return [
            path("", view(self.changelist_view), name="pgqueue_admin_job_changelist"),
            path("<int:id>/", view(self.job_view), name="pgqueue_admin_job_change"),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """The newest jobs that fit, and the actions on those that are chosen."""
        self._check(request)
        if request.method == "POST":
            return self._act(request)
        chosen = {name: value for name in FILTERS if (value := request.GET.get(name))}
        try:
            found = search(_alias(), room=ROOM, limit=SHOWN, after=_place(request.GET.get("after")), **chosen)
        except pgqueue.InvalidOption as error:
            messages.error(request, str(error))
            return HttpResponseRedirect(_list_url())
        more = {"jobs": [_shown(job) for job in found.jobs], "states": ASKED, "chosen": chosen, "page": found}
        more["older"] = found.after is not None and urlencode({**chosen, "after": found.after})
        return self._page(request, "pgqueue_admin/jobs.html", "Jobs", more | {"most": SEARCHED_MOST})

    def job_view(self, request: HttpRequest, id: int) -> HttpResponse:
        """All about one job."""
        self._check(request)
        try:
            job = pgqueue.get(_alias(), id)
        except (pgqueue.JobNotFound, pgqueue.InvalidOption):
            raise Http404(f"there is no job {id}") from None
        return self._page(request, "pgqueue_admin/job.html", f"Job {id}", {"job": _shown(job)})

    def _check(self, request: HttpRequest) -> None:
        if not self.has_view_permission(request):
            raise PermissionDenied

    def _page(self, request: HttpRequest, template: str, title: str, more: dict[str, Any]) -> HttpResponse:
        actions = [name for name in ACTIONS if request.user.has_perm(f"pgqueue_admin.{name}_job")]
        known = {"opts": self.opts, "title": title, "actions": actions, "list_url": _list_url()}
        return TemplateResponse(request, template, self.admin_site.each_context(request) | known | more)

    def _act(self, request: HttpRequest) -> HttpResponse:
        name, ids = request.POST.get("action", ""), [int(each) for each in request.POST.getlist("id") if digits(each)]
        if name not in ACTIONS or not request.user.has_perm(f"pgqueue_admin.{name}_job"):
            raise PermissionDenied
        back = request.POST.get("back", "")
        if ids:
            try:
                with transaction.atomic(using=_alias()):
                    answers = ACTIONS[name](_alias(), *ids[:SHOWN], actor=request.user.get_username())
                told = Counter(WORDS[each.did].line.format(each) for each in answers)
                messages.info(request, "; ".join(f"{count} × {line}" for line, count in told.items()))
            except pgqueue.Error as error:
                messages.error(request, f"Nothing was done: {error}")
        return HttpResponseRedirect(f"{_list_url()}?{back}" if back else _list_url())


def _alias() -> str:
    return project_settings.alias()


def _list_url() -> str:
    return str(reverse("admin:pgqueue_admin_job_changelist"))


def _place(after: str | None) -> int | str | None:
    return int(after) if after and after.isascii() and after.isdecimal() else after or None


def _shown(job: JobInfo) -> Any:
    """The job as a page shows it, without secrets."""
    item = {each.name: getattr(job, each.name) for each in fields(job)}
    plain = {"progress": job.progress and str(job.progress), "attempts": [asdict(each) for each in job.attempts]}
    plain["steps"] = [asdict(each) for each in job.steps]
    return _redaction.shown(item | plain)
