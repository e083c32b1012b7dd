-- Why a job does not run, or is not finished. Everything here only reads. What it reads stands in functions, because a
-- session that is not ours plans as it likes.

-- name: why_waiting
-- What decides whether a waiting job may be claimed, as one JSON object:
-- * `place`: where the job is now. NULL: it waits no more.
-- * `queue_paused`, `task_paused`: since when and by which operator; NULL: open.
-- * `workers`: those of the queue that are not known to be dead, the newest 1,000.
-- * `held`: what those of them hold that know the task, up to 1,000 jobs of each of 50 workers, and 5,000 in all. `whole`: it is not cut at
--   5,000. A worker that is not `looked` at says only how many jobs it was `running` at its last heartbeat.
SELECT said FROM pgqueue.why_waiting(%(id)s::bigint, %(queue)s::text, %(task)s::text) AS said;

-- name: why_lane
-- How many available jobs a claim takes before this job, counted to 1,001: `jobs` of its queue, and `urgent` ones of other queues whose jobs
-- fill the same slots. Not those of paused tasks, or of tasks that the worker does not know. And how many jobs of the queue have started in a
-- second, in those of the last five minutes in which any did (NULL: none did, or the history does not know them yet). Not `whole`: there may
-- be more, because 2,000 were read, or there are many dead rows and only the last 10,000 positions were looked at. NULL: it is not available.
SELECT jobs, whole, pace, urgent FROM pgqueue.why_lane(%(id)s::bigint);

-- name: why_key
-- What a job with this rank and id waits for, of this key (`lock:…`, `limit:…`, `rate:…`), as one JSON object:
-- * `most`: how many jobs may hold a limit. NULL: it is not declared, or it is no limit.
-- * `holders`: the jobs that hold a lock or a limit, the oldest first; up to 100 more than may. Of a chain (see chains.py) only the first.
-- * `before`: how many jobs wait for the key before it, counted to 1,001. Not those that are passed over: of other paused queues and tasks,
--   and those that no live worker takes. `whole`: none was left out for many dead rows, or because 2,000 were read.
-- * `rate`: what is declared of a rate; in how many seconds its next job may start (`pause`), and the seconds from one start to the next.
SELECT said FROM pgqueue.why_key(%(id)s::bigint, %(rank)s::integer, %(key)s::text, %(lock_limit)s::integer) AS said;

-- name: why_node
-- What a job waits for before its release, as one JSON object; no row: it does not wait for that.
-- * `node`: its own. `nodes`: how many nodes it waits for; `living`: how many of them have a job that lives.
-- * `first`: the oldest of those, how many of its jobs live, and the oldest of these.
-- * `ended_at`: when the last job of the node ended that it has waited for. NULL: history does not know.
SELECT said FROM pgqueue.why_node(%(id)s::bigint) AS said;

-- name: why_running
-- What can be said of a running job, as one JSON object; NULL: it does not run.
-- * `worker`: the worker that has it; `begun`: whether its handler had started at that worker's last heartbeat, NULL: too young to tell.
-- * `behind`: the job of the same chain that runs before it (see chains.py).
-- * `p95`: the seconds that 95 of 100 runs of its task have not exceeded in the last 24 hours. NULL: none has ended.
-- * `requests`: what was asked of it. `sessions`: its own sessions, with what each waits for, and the sessions that keep it waiting.
SELECT said FROM pgqueue.why_running(%(id)s::bigint) AS said;

-- name: why_missing
-- What can be told of an id without a job, as one JSON object:
-- * `last`: the last id that was given. NULL: this role may not see it.
-- * `after`: when the next job with a higher id was enqueued, as far as it is near; NULL: none is known.
-- * `older`: whether a job with a lower id is still there.
-- * `done_kept`, `dead_kept`: for how many seconds ended jobs are kept at least.
-- * `open`: transactions of other sessions that have written something, prepared ones among them.
-- The function looks at the 3,000 ids behind this one, which have to be numbers still.
SELECT said FROM pgqueue.why_missing(least(%(id)s::bigint, 9223372036854770000)) AS said;

-- name: why_cancelled_by
-- The operators that have cancelled this job, the last one first, as one JSON object; with the time now. A cancel that was made before a retry
-- is not why the job has ended since: it is left out. `ended_at` is when the job has ended, NULL if it has not.
WITH changed AS MATERIALIZED (
    SELECT r.actor, r.role, r.at, r.action FROM (
        {{audit_with_job}}
    ) AS r
)
SELECT json_build_object('now', pgqueue.now(), 'by', (
    SELECT coalesce(json_agg(json_build_object('actor', a.actor, 'role', a.role, 'at', a.at) ORDER BY a.at DESC), '[]')
    FROM (SELECT c.actor, c.role, c.at FROM changed c
          WHERE c.action IN ('cancel', 'bulk cancel') AND NOT EXISTS (
              SELECT FROM changed r WHERE r.action IN ('retry', 'bulk retry') AND r.at > c.at
                AND r.at < coalesce(%(ended_at)s::text::timestamptz, pgqueue.now()))
          ORDER BY c.at DESC LIMIT 10) AS a))::text;

-- name: why_names
-- The pairs of a queue and a task that live workers take jobs of, as one JSON array.
SELECT (SELECT coalesce(json_agg(json_build_array(s.queue, s.task)), '[]')::text FROM pgqueue.served() AS s);

-- name: why_now
-- The time.
SELECT json_build_object('now', pgqueue.now())::text;
