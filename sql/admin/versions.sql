-- name: versions_list
-- Since when each version of the application runs, the newest first, n at most, as JSON: by its first worker. A start that is not noted is
-- that of the oldest worker which is not known to be dead.
SELECT coalesce(json_agg(json_build_object('version', v.version_tag, 'first_at', extract(epoch FROM v.at)::float8, 'is_live', v.is_live)
                         ORDER BY v.at DESC, v.version_tag), '[]')::text
FROM (
    SELECT each.version_tag, min(each.at) AS at, bool_or(each.is_live) AS is_live
    FROM (SELECT s.version_tag, s.first_at AS at, false AS is_live FROM pgqueue.version_start s
          UNION ALL
          SELECT w.version_tag, w.started_at, true FROM pgqueue.worker w WHERE w.dead_at IS NULL) AS each
    GROUP BY each.version_tag ORDER BY at DESC, each.version_tag LIMIT %(n)s::integer
) AS v;
