-- What is recorded of a job that was enqueued by hand.

-- name: enqueue_by_hand_record
-- The row of the record for this job. In the transaction that makes the job: so the row is there exactly if the job is.
INSERT INTO pgqueue.audit (actor, action, target, jobs)
SELECT {{actor}}, 'enqueue', jsonb_build_object('task', %(task)s::text, 'queue', %(queue)s::text), ARRAY[%(id)s::bigint]
RETURNING id;
