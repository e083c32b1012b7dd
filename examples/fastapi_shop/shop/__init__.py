"""A shop on FastAPI and SQLAlchemy, whose jobs are in its own database."""
