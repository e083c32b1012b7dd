"""Bodies of the transactions, and what stands in for them: a function in threads, a coroutine function on the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pgqueue.worker.transactions.steps import run

Step = Callable[..., Any]


def real(owner: type, name: str) -> tuple[Step, Step]:
    """The body as it is, for a thread and for the loop."""
    body = getattr(owner, name)

    def step(*args: Any, **how: Any) -> Any:
        return run(body(*args, **how))

    return step, body


def replace(patch: pytest.MonkeyPatch, owner: type, name: str, step: Step | None, astep: Step | None) -> None:
    """Take these instead; None: the real one."""
    in_thread, on_loop = real(owner, name)

    async def replaced(self: Any, *args: Any, **how: Any) -> Any:
        if getattr(self, "_side", self).is_async:
            return await (astep or on_loop)(self, *args, **how)
        return (step or in_thread)(self, *args, **how)

    patch.setattr(owner, name, replaced)
