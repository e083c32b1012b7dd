"""How pgqueue speaks to PostgreSQL. Knows no job."""
