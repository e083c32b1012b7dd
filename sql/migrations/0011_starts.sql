-- breaking: no
--
-- The holders of a lock are read from where nobody held it last, and not from the first row that ever did: while somebody has a
-- snapshot the entries of all that have gone stay in the index (pgqueue/starts.py says why that is exact).

-- In which order holders have come: what enters `running` draws the next number, but for the plain jobs of a claim. A default, so
-- that workers of the version before, who know of none, draw one, too; and whoever could enqueue or work so far may.
ALTER TABLE pgqueue.job ADD COLUMN hold_pos bigint;
CREATE SEQUENCE pgqueue.job_hold_seq AS bigint CACHE 1;
ALTER TABLE pgqueue.job_running ALTER hold_pos SET DEFAULT nextval('pgqueue.job_hold_seq');

-- Not owned by the column: TRUNCATE … RESTART IDENTITY would have it begin again under workers that remember its numbers.
DO $$
DECLARE
    allowed record;
BEGIN
    EXECUTE format('ALTER SEQUENCE pgqueue.job_hold_seq OWNER TO %I', (
        SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'pgqueue.job_running'::regclass));
    FOR allowed IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
               CASE WHEN bool_or(a.is_grantable) THEN 'WITH GRANT OPTION' ELSE '' END AS too
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
        WHERE c.oid = 'pgqueue.job_pos_seq'::regclass AND a.grantee <> c.relowner AND a.privilege_type = 'USAGE'
        GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT USAGE ON SEQUENCE pgqueue.job_hold_seq TO %s %s', allowed.role, allowed.too);
    END LOOP;
END $$;

-- A row of before has none and stands behind all others: it is always read.
DROP INDEX pgqueue.job_running_lock;
CREATE INDEX job_running_lock ON pgqueue.job_running (lock_key, coalesce(hold_pos, 9223372036854775807)) WHERE lock_key IS NOT NULL;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (11, 'starts', false);
