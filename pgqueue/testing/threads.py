"""In which threads handlers run that are of the other kind, sync or async, than the test.

A connection of Django belongs to a thread, and the test's transaction is on that of the test. So where Django is
loaded, asgiref is told the thread: async handlers send their statements in the thread of the sync test, and sync
handlers run in the thread of the async ORM. Else each has a thread of its own.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any


def run_async(handler: Coroutine[Any, Any, Any]) -> Any:
    """Run an async handler to its end, on a fresh loop in another thread."""
    if django_waits():
        from asgiref.sync import async_to_sync

        return copy_context().run(async_to_sync(_awaited, force_new_loop=True), handler)
    with ThreadPoolExecutor(1, "pgqueue-testing") as thread:
        return thread.submit(copy_context().run, asyncio.run, handler).result()


async def run_sync(handler: Callable[..., Any], *args: Any) -> Any:
    """Run a sync handler to its end, in another thread than that of this loop."""
    if _django():
        from asgiref.sync import sync_to_async

        return await sync_to_async(copy_context().run)(handler, *args)
    return await asyncio.to_thread(handler, *args)


def django_waits() -> bool:
    """Whether this thread, which is about to wait for async code, is to run what that sends through Django."""
    return _django() and asyncio._get_running_loop() is None


def _django() -> bool:
    return "django.db" in sys.modules


async def _awaited(handler: Coroutine[Any, Any, Any]) -> Any:
    return await handler


class WaitingThread(Executor):
    """Runs calls in the thread that waits: `for_django` tells the async ORM to use it.

    As the executor of `async_to_sync`, but for a loop that outlives one call.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Called by asyncio, from the thread of the loop."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:  # the loop is told of it
                future.set_exception(error)

        self._calls.put(run)
        return future

    def wait(self, done: Future[Any]) -> Any:
        """Run calls until this is done; what it gave."""
        done.add_done_callback(lambda _: self._calls.put(lambda: None))
        while not done.done():
            self._calls.get()()
        return done.result()

    @contextmanager
    def for_django(self) -> Iterator[None]:
        """In this block the async ORM sends here the statements of the loop on which it is entered."""
        from asgiref.sync import AsyncToSync

        executors: dict[Any, Any] = AsyncToSync.loop_thread_executors
        loop = asyncio.get_running_loop()
        executors[loop] = self
        try:
            yield
        finally:
            del executors[loop]
