-- name: sequences_advance
-- Advance the sequences that lag behind the tables, which `advance_sequences` does under a lock. A row for each: its name, the
-- number it had given last, the highest number in the tables, and the number it goes on from. `whole`: unique keys are read, too.
SELECT sequence, given, highest, advanced_to FROM pgqueue.advance_sequences(%(whole)s::boolean);

-- name: sequences_allowed
-- Whether this role may advance them. No row: the schema is of a version that could not.
SELECT has_function_privilege(oid, 'EXECUTE') FROM pg_proc
WHERE oid = to_regprocedure('pgqueue.advance_sequences(boolean)');

-- name: sequences_highest
-- The highest id of a job in any table; NULL if there is none.
SELECT pgqueue.highest_job_id(4611686018427387904, false);

-- name: sequences_number
-- The number of this database, from 0 to 1023: its jobs' ids begin at number << 43 plus one.
SELECT {{number}};

-- name: sequences_set_number
-- Give this database its number, as `set_number` does. NULL, or the highest id of a job, which is above all its ids.
SELECT pgqueue.set_number(%(number)s::integer);
