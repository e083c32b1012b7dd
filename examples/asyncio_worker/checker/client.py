"""What all jobs of a process share: one HTTP client. It is there from the first job to the last."""

from collections.abc import AsyncIterator

import httpx

import pgqueue


@pgqueue.lifespan
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """The client is `job.resources` in each handler."""
    async with httpx.AsyncClient(timeout=10, follow_redirects=True) as client:
        yield client
