"""The endpoints of the shop."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Path, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

import pgqueue
from shop.database import Purchase, sessions
from shop.tasks import charge

app = FastAPI()


async def get_session() -> AsyncIterator[AsyncSession]:
    """A session for one request. The endpoint commits."""
    async with sessions() as session:
        yield session


Session = Annotated[AsyncSession, Depends(get_session)]
JobId = Annotated[int, Path(ge=1, lt=2**63)]
Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=100)]


class JobStatus(BaseModel):
    """What a customer may see of a job."""

    id: int
    state: str
    result: Any


@app.get("/jobs/{id}", response_model=JobStatus)
async def job_status(id: JobId, session: Session) -> Any:
    """Where the job stands."""
    return await pgqueue.aget(session, id)


@app.exception_handler(pgqueue.JobNotFound)
async def no_such_job(request: Request, error: Exception) -> Response:
    """A job that is unknown is 404 everywhere."""
    return JSONResponse({"detail": "no such job"}, status_code=404)


@app.post("/purchases/{item}", status_code=202)
async def buy(item: str, session: Session, key: Key = None) -> Response:
    """Buy something: 202, and where to look. With a key a request that comes again buys nothing more."""
    async with session.begin():
        purchase = await next_purchase(session)
        job = await charge.using(idempotency_key=key and f"buy:{key}").aenqueue(session, purchase)
        if job.created:
            session.add(Purchase(id=purchase, item=item))
    return Response(status_code=202, headers={"Location": app.url_path_for("job_status", id=job.id)})


async def next_purchase(session: AsyncSession) -> int:
    """The id of a purchase that may be made."""
    return (await session.execute(text("SELECT nextval('purchase_id_seq')"))).scalar_one()
