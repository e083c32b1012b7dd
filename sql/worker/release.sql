-- What the releaser asks: which nodes have ended that jobs wait for, and what becomes of these jobs (pgqueue/worker/flows/releaser.py has
-- the proof).

-- name: release_look
-- Those of these nodes for which a job waits, and of which no job lives.
SELECT x.node FROM (SELECT DISTINCT a.node FROM unnest(%(nodes)s::bigint[]) AS a (node)) AS x
WHERE (SELECT true FROM pgqueue.job_blocked b WHERE b.key = 'node:' || x.node ORDER BY b.rank, b.id LIMIT 1) AND NOT {{node_lives}};

-- name: release_walk
-- Look at the next n nodes for which jobs wait, after the key `after`, in the order of their keys. Answers those of which no job lives,
-- and the last key looked at (NULL: the walk is at its end). Jumps along the index of keys.
WITH RECURSIVE {{watched_nodes}}
SELECT ARRAY(SELECT x.node FROM named AS x WHERE x.node IS NOT NULL AND NOT {{node_lives}} ORDER BY x.place),
    (SELECT key FROM named WHERE place = %(n)s::integer);

-- name: release_jobs
-- Go on with up to n jobs that wait for nodes of these that have ended, but for those in `passed`. Each is judged by the nodes that its own
-- node waits for, all in one snapshot:
-- 1. If one of those lives, the job waits for that one next: of the nodes below the one it waited for the highest, else the highest of all.
-- 2. If a job failed or was cancelled of a node that must complete, it is cancelled, reason `dependency`.
-- 3. If it waits for the failure of nodes, and no job of these failed or was cancelled, it is skipped.
-- 4. If its arguments would be larger than a worker reads, with the results, it fails, reason `arguments`. So it does if
--    no job is left of a node whose result it gets.
-- 5. Else it is released. The results that the released jobs get have `bytes` bytes together, or one more result has: the other jobs
--    stay for the next look. The first one always goes.
--
-- A cancelled node takes those with it that wait for nothing else, down the graph: as many as n allows, and each only if all jobs of the
-- node before it that live are cancelled here.
--
-- Each distinct list of nodes is judged once. Waits for no lock of a job. Answers how many jobs went on, the nodes that have to be looked
-- at now (those that jobs wait for next, those of jobs that ended here, and those of jobs that stay), and how many jobs were released.
WITH RECURSIVE {{impatience}}, ended AS MATERIALIZED (
    SELECT x.node FROM (SELECT DISTINCT a.node FROM unnest(%(nodes)s::bigint[]) AS a (node) ORDER BY 1) AS x WHERE NOT {{node_lives}}
), picked AS MATERIALIZED (
    SELECT waiting.ctid, waiting.id, waiting.size, ended.node AS waited_for, -waiting.node AS node
    FROM ended CROSS JOIN LATERAL (
        SELECT b.ctid, b.id, b.node, pg_column_size(b.args) AS size FROM pgqueue.job_blocked b
        WHERE b.key = 'node:' || ended.node AND b.id <> ALL (%(passed)s::text::bigint[])
        ORDER BY b.rank, b.id LIMIT %(n)s::integer FOR UPDATE SKIP LOCKED
    ) AS waiting
    LIMIT %(n)s::integer
), asked AS MATERIALIZED (
    -- A node without its row, as after a restore of parts, has waited for what its jobs wait for.
    SELECT p.node, p.waited_for, coalesce(n.after, ARRAY[p.waited_for]) AS after, coalesce(n.after_end, '{}') AS after_end,
        coalesce(n.after_failure, '{}') AS after_failure, n.results
    FROM (SELECT picked.node, min(picked.waited_for) AS waited_for FROM picked GROUP BY picked.node) AS p
    LEFT JOIN LATERAL (
        SELECT n.after, n.after_end, n.after_failure, n.results FROM pgqueue.node n WHERE n.id = p.node LIMIT 1) AS n ON true
), lists AS MATERIALIZED (
    SELECT after, after_end, after_failure, min(waited_for) AS waited_for FROM asked GROUP BY after, after_end, after_failure
), judged AS MATERIALIZED (
    SELECT l.after, l.after_end, l.after_failure, l.next, completes.failed_node, completes.failed_id,
        CASE WHEN l.next IS NOT NULL THEN 'waits'
             WHEN completes.failed_id IS NOT NULL THEN 'cancelled'
             WHEN l.after_failure <> '{}' AND fails.failed_id IS NULL THEN 'skipped'
             ELSE 'released' END AS verdict
    FROM (
        SELECT lists.*, coalesce(
            (SELECT x.node FROM (
                 SELECT u.node FROM unnest(lists.after || lists.after_end || lists.after_failure) AS u (node)
                 WHERE u.node < lists.waited_for ORDER BY u.node DESC OFFSET 0) AS x
             WHERE {{node_lives}} LIMIT 1),
            (SELECT x.node FROM (
                 SELECT u.node FROM unnest(lists.after || lists.after_end || lists.after_failure) AS u (node)
                 WHERE u.node >= lists.waited_for ORDER BY u.node DESC OFFSET 0) AS x
             WHERE {{node_lives}} LIMIT 1)) AS next
        FROM lists OFFSET 0
    ) AS l
    LEFT JOIN LATERAL (
        SELECT found.id AS failed_id, found.node AS failed_node
        FROM (SELECT l.after || ARRAY(SELECT -u.node FROM unnest(l.after) AS u (node)) AS nodes WHERE l.next IS NULL AND l.after <> '{}') AS named
        CROSS JOIN LATERAL ({{node_failed}}) AS found
    ) AS completes ON true
    LEFT JOIN LATERAL (
        SELECT found.id AS failed_id
        FROM (SELECT l.after_failure || ARRAY(SELECT -u.node FROM unnest(l.after_failure) AS u (node)) AS nodes
              WHERE l.next IS NULL AND l.after_failure <> '{}') AS named
        CROSS JOIN LATERAL ({{node_failed}}) AS found
    ) AS fails ON true
), sorted AS MATERIALIZED (
    SELECT asked.node, asked.results, judged.next, judged.verdict, judged.failed_node, judged.failed_id
    FROM asked JOIN judged USING (after, after_end, after_failure)
), doomed (node, parent) AS (
    SELECT s.node, NULL::bigint FROM sorted s WHERE s.verdict = 'cancelled'
    UNION ALL
    SELECT child.node, doomed.node
    FROM doomed CROSS JOIN LATERAL (
        SELECT DISTINCT -w.node AS node FROM (
            SELECT b.node FROM pgqueue.job_blocked b WHERE b.key = 'node:' || doomed.node ORDER BY b.rank, b.id LIMIT %(n)s::integer) AS w
    ) AS child
    CROSS JOIN LATERAL (
        SELECT n.id FROM pgqueue.node n
        WHERE n.id = child.node AND n.after = ARRAY[doomed.node] AND n.after_end = '{}' AND n.after_failure = '{}' LIMIT 1) AS waits_only
), doomed_some AS MATERIALIZED (
    SELECT doomed.node, doomed.parent FROM doomed WHERE doomed.parent IS NOT NULL
    LIMIT greatest(%(n)s::integer - (SELECT count(*) FROM picked), 0)
), below AS MATERIALIZED (
    SELECT waiting.ctid, waiting.id, d.node FROM doomed_some d CROSS JOIN LATERAL (
        SELECT b.ctid, b.id FROM pgqueue.job_blocked b
        WHERE b.node = -d.node AND b.key IS NOT DISTINCT FROM 'node:' || d.parent AND b.id <> ALL (%(passed)s::text::bigint[])
        ORDER BY b.id DESC NULLS LAST LIMIT %(n)s::integer FOR UPDATE SKIP LOCKED
    ) AS waiting
    LIMIT greatest(%(n)s::integer - (SELECT count(*) FROM picked), 0)
), held AS MATERIALIZED (
    -- Of these nodes all jobs that live are locked here.
    SELECT x.node, x.parent, x.first FROM (
        SELECT counted.node, d.parent, counted.n, counted.first
        FROM (SELECT taken_here.node, count(*) AS n, min(taken_here.id) AS first
              FROM (SELECT picked.node, picked.id FROM picked UNION ALL SELECT below.node, below.id FROM below) AS taken_here
              WHERE EXISTS (SELECT FROM doomed_some) GROUP BY taken_here.node) AS counted
        LEFT JOIN doomed_some d ON d.node = counted.node OFFSET 0
    ) AS x
    WHERE x.n = (SELECT count(*) FROM (SELECT j.id FROM pgqueue.job_blocked j WHERE j.node = -x.node LIMIT x.n + 1) AS j)
      AND ({{released_lives}}) IS NULL
), fallen (node, parent) AS (
    SELECT s.node, NULL::bigint FROM sorted s JOIN held ON held.node = s.node WHERE s.verdict = 'cancelled'
    UNION ALL
    SELECT held.node, held.parent FROM fallen JOIN held ON held.parent = fallen.node
), settled AS MATERIALIZED (
    SELECT sorted.node, sorted.results, sorted.next, sorted.verdict, sorted.failed_node, sorted.failed_id FROM sorted
    UNION ALL
    SELECT f.node, NULL, NULL, 'cancelled', f.parent, held.first FROM fallen f JOIN held ON held.node = f.parent
), resulted AS MATERIALIZED (
    SELECT s.node, p.name, (p.said ->> 'node')::bigint AS source, coalesce((p.said ->> 'many')::boolean, false) AS many
    FROM sorted s CROSS JOIN LATERAL jsonb_each(s.results) AS p (name, said) WHERE s.verdict = 'released'
), placed AS MATERIALIZED (
    SELECT picked.ctid, picked.node, picked.waited_for, picked.size, row_number() OVER () AS place FROM picked
), given AS MATERIALIZED (
    -- Each result is read once, however many jobs get it: those of the first jobs first.
    SELECT g.node AS source, g.many, g.value, g.bytes, g.ended
    FROM (
        SELECT array_agg(each.source ORDER BY each.place, each.source) AS nodes, array_agg(each.many ORDER BY each.place, each.source) AS many
        FROM (SELECT r.source, r.many, min(p.place) AS place
              FROM resulted r JOIN (SELECT placed.node, min(placed.place) AS place FROM placed GROUP BY placed.node) AS p ON p.node = r.node
              GROUP BY r.source, r.many) AS each
    ) AS needed
    CROSS JOIN LATERAL pgqueue.release_results(needed.nodes, needed.many, 2097152, %(bytes)s::bigint) AS g
), sized AS MATERIALIZED (
    SELECT x.node, x.fits, x.ended, CASE WHEN x.fits THEN x.bytes ELSE 0 END AS bytes FROM (
        SELECT r.node, count(*) = count(g.source) AS read, sum(g.bytes) AS bytes, bool_and(g.ended) AS ended,
            bool_and(g.bytes IS NOT NULL) FILTER (WHERE g.source IS NOT NULL) AND sum(g.bytes) <= 2097152 AS fits
        FROM resulted r LEFT JOIN given g ON g.source = r.source AND g.many = r.many GROUP BY r.node
    ) AS x WHERE x.read OR NOT x.fits
), stays AS MATERIALIZED (
    SELECT x.place, x.waited_for FROM (
        SELECT p.place, p.waited_for, sized.node IS NOT NULL AS read,
            coalesce(sum(sized.bytes + p.size) OVER (ORDER BY p.place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS bytes
        FROM placed p JOIN (SELECT DISTINCT resulted.node FROM resulted) AS gets ON gets.node = p.node LEFT JOIN sized ON sized.node = p.node
    ) AS x WHERE NOT x.read OR x.bytes >= %(bytes)s::bigint
), goes AS MATERIALIZED (
    SELECT placed.ctid, placed.node FROM placed WHERE NOT EXISTS (SELECT FROM stays WHERE stays.place = placed.place)
), taken AS MATERIALIZED (
    SELECT goes.ctid FROM goes
    UNION ALL SELECT below.ctid FROM below WHERE below.node IN (SELECT f.node FROM fallen f WHERE f.parent IS NOT NULL)
), merged AS MATERIALIZED (
    -- As text: jsonb_object_agg takes half a second for a list of 55,000 texts, this a twentieth of that.
    SELECT r.node, ('{' || string_agg(to_jsonb(r.name)::text || ': ' || pgqueue.text_of(g.value), ', ') || '}')::jsonb AS results
    FROM sized s JOIN resulted r ON r.node = s.node JOIN given g ON g.source = r.source AND g.many = r.many
    WHERE s.fits AND s.ended AND s.node IN (SELECT goes.node FROM goes)
    GROUP BY r.node
), gone AS (
    DELETE FROM pgqueue.job_blocked WHERE {{hurried}} AND ctid = ANY (ARRAY(SELECT ctid FROM taken)) RETURNING {{job}}, {{attempts}}, rank
), went AS MATERIALIZED (
    SELECT gone.*, s.next, s.failed_node, s.failed_id, CASE WHEN full_args.fit THEN full_args.value END AS full_args,
        CASE WHEN full_args.fit THEN s.verdict ELSE 'failed' END AS verdict, z.ended IS FALSE AS lost
    FROM gone JOIN settled s ON s.node = -gone.node
    LEFT JOIN sized z ON z.node = s.node
    LEFT JOIN merged m ON m.node = s.node
    CROSS JOIN LATERAL (
        SELECT whole.value, z.node IS NULL OR octet_length(pgqueue.text_of(whole.value)) <= 2097152 IS TRUE AS fit
        FROM (SELECT CASE WHEN z.node IS NULL THEN gone.args ELSE gone.args || m.results END AS value OFFSET 0) AS whole OFFSET 0
    ) AS full_args
), waits AS (
    INSERT INTO pgqueue.job_blocked (state, key, rank, {{attempts}}, {{job}})
    SELECT 'blocked', 'node:' || next, rank, {{attempts}}, {{job}} FROM went WHERE verdict = 'waits'
    RETURNING id
), free AS MATERIALIZED (
    SELECT id, CASE WHEN headers = '{}' THEN NULL ELSE headers END AS headers, {{beside_node}}, node, max_attempts, deadline,
        attempt, crashes, snoozes, coalesce(run_at, pgqueue.now() + make_interval(secs => delay)) AS run_at
    FROM (
        SELECT id, CASE WHEN jsonb_typeof(headers) = 'object' THEN headers - 'pgqueue:delay' ELSE headers END AS headers, queue, priority, task,
            full_args AS args, enqueued_at, {{keys}}, unique_key, idempotency_key, -node AS node, max_attempts, deadline, {{attempts}},
            CASE WHEN jsonb_typeof(headers -> 'pgqueue:delay') = 'number' AND (headers -> 'pgqueue:delay')::numeric BETWEEN 0 AND 3155760000
                 THEN (headers -> 'pgqueue:delay')::float8 END AS delay
        FROM went WHERE verdict = 'released'
    ) AS freed
), timed AS MATERIALIZED (
    SELECT free.*, run_at > pgqueue.now() IS TRUE AS later FROM free
), available AS (
    INSERT INTO pgqueue.job_available (state, rank, {{attempts}}, {{job}})
    SELECT 'available', CASE crashes WHEN 0 THEN 2 * priority + 1 WHEN 1 THEN -2 ELSE -1 END, {{attempts}}, {{job}}
    FROM timed WHERE NOT later ORDER BY id
    RETURNING id, queue
), scheduled AS (
    INSERT INTO pgqueue.job_scheduled (state, rank, {{attempts}}, {{job}})
    SELECT 'scheduled', 2 * priority + 1, {{attempts}}, {{job}} FROM timed WHERE later
    RETURNING id
), noted AS (
    INSERT INTO pgqueue.attempt (job_id, enqueued_at, attempt, worker_id, claim, started_at, finished_at, bin, outcome, message, version_tag)
    SELECT went.id, went.enqueued_at, went.attempt, %(worker_id)s::bigint, 0, pgqueue.now(), pgqueue.now(),
        (SELECT bin FROM pgqueue.ring WHERE kind = 'attempt'), verdict,
        CASE WHEN verdict = 'failed' AND lost THEN 'no job is left of a node whose result it waited for'
             WHEN verdict = 'failed' THEN 'with the results that it waited for its arguments have more than 2097152 bytes'
             ELSE 'dependency: job ' || failed_id || ' of ' || coalesce('node ' || quote_literal(n.name), 'node ' || (failed_node & 1048575))
                  || ' failed or was cancelled' END,
        %(version_tag)s::text
    FROM went LEFT JOIN LATERAL (SELECT n.name FROM pgqueue.node n WHERE n.id = went.failed_node LIMIT 1) AS n ON true
    WHERE verdict IN ('cancelled', 'failed')
), dead AS (
    INSERT INTO pgqueue.job_dead (state, finished_at, bin, reason, version_tag, {{attempts}}, {{job}})
    SELECT verdict, pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'dead'),
        CASE verdict WHEN 'failed' THEN 'arguments' ELSE 'dependency' END, %(version_tag)s::text, {{attempts}}, {{job}}
    FROM went WHERE verdict IN ('cancelled', 'failed')
    RETURNING id
), skipped AS (
    INSERT INTO pgqueue.job_done (state, finished_at, bin, reason, version_tag, {{attempts}}, {{job}})
    SELECT 'skipped', pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'done'), 'dependency', %(version_tag)s::text, {{attempts}}, {{job}}
    FROM went WHERE verdict = 'skipped'
    RETURNING id
), happened AS MATERIALIZED (
    SELECT queue, task, verdict AS what FROM went WHERE verdict IN ('cancelled', 'failed', 'skipped')
), counted AS (
    {{count_happened}}
), told AS (
    SELECT CASE WHEN {{may_notify}} THEN pg_notify('pgqueue.' || channel, '')::text END AS done
    FROM (SELECT queue::text AS channel FROM available
          UNION SELECT ':scheduled' FROM scheduled
          UNION SELECT ':ended.' || w.job_id FROM pgqueue.job_waiter w
                WHERE w.job_id = ANY (ARRAY(SELECT id FROM dead UNION ALL SELECT id FROM skipped))) AS news
    WHERE %(notify)s::boolean
)
SELECT CASE
    WHEN (SELECT count(*) FROM gone) <> (
        SELECT count(*) FROM (SELECT id FROM waits UNION ALL SELECT id FROM scheduled UNION ALL SELECT id FROM dead UNION ALL SELECT id FROM skipped
                              UNION ALL SELECT id FROM available) AS moved)
    THEN pgqueue.refuse('a release deleted jobs it did not move') ELSE (SELECT count(*) FROM went) END,
    ARRAY(SELECT DISTINCT next FROM went WHERE verdict = 'waits'
          UNION SELECT DISTINCT -node FROM went WHERE verdict IN ('cancelled', 'failed', 'skipped')
          UNION SELECT stays.waited_for FROM stays),
    (SELECT count(*) FROM timed), (SELECT count(done) FROM told), {{patient}};

-- name: release_first
-- The id and the task of the job that `release_jobs` would go on with first, and the node that it waits for. No row: there is none.
SELECT waiting.id, waiting.task, x.node
FROM (SELECT DISTINCT a.node FROM unnest(%(nodes)s::bigint[]) AS a (node) ORDER BY 1) AS x CROSS JOIN LATERAL (
    SELECT b.id, b.task FROM pgqueue.job_blocked b
    WHERE b.key = 'node:' || x.node AND b.id <> ALL (%(passed)s::text::bigint[])
    ORDER BY b.rank, b.id LIMIT 1 FOR UPDATE SKIP LOCKED
) AS waiting
WHERE NOT {{node_lives}} LIMIT 1;
