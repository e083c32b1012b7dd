-- name: identity_read
-- Which database this is, whatever it is called: the identifier of its server, and its own there. And its number among several.
SELECT s.system_identifier, d.oid::bigint, {{number}}
FROM pg_control_system() AS s CROSS JOIN pg_database d WHERE d.datname = current_database();
