"""The tasks of the checker."""

from urllib.parse import urlsplit

import pgqueue
from pgqueue import Every, Rate


def host(url: str) -> str:
    """The host of a page: each has a rate for itself."""
    return urlsplit(url).netloc


@pgqueue.task(
    transactional=True, unique="page:{url}", rate=Rate("5/s", key=host, name="pages", burst=5), retry=3, timeout=30
)
async def check(job: pgqueue.Job, url: str) -> int:
    """Ask for a page, and write down what it answers. A page that does not answer at all is tried again."""
    answer = await job.resources.head(url)
    conn = await job.aconnection()
    await conn.execute("UPDATE page SET status = %s, checked_at = now() WHERE url = %s", [answer.status_code, url])
    return answer.status_code


@pgqueue.task(schedule=Every("15m"), transactional=True)
async def check_all(job: pgqueue.Job) -> int:
    """Enqueue a job for each page. A page whose job still waits is not enqueued twice."""
    conn = await job.aconnection()
    pages = [url for (url,) in await (await conn.execute("SELECT url FROM page ORDER BY url")).fetchall()]
    await check.aenqueue_many(conn, [(url,) for url in pages])
    return len(pages)
