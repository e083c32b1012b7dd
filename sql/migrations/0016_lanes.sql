-- breaking: no
--
-- Jobs with keys (a lock, a limit, a rate) have lanes of their own, and a claim of their own: the claim of a plain job knows nothing
-- of keys, and no plain job waits behind one that needs a key. Each claim states the condition of its index. No row moves: those that
-- the version before has put in are found all the same. Its own index stays for its workers; the next version drops it.
--
-- NULLS FIRST: no position is NULL, but the order has another name. While a table is empty all indexes cost the same, and a plan made
-- then is kept (see 0014). The old index does not give this order, so these two are taken however a statement was planned.
CREATE INDEX job_available_plain ON pgqueue.job_available (queue, rank, pos NULLS FIRST)
    WHERE coalesce(lock_key, limit_key, rate_key) IS NULL;
CREATE INDEX job_available_keyed ON pgqueue.job_available (queue, rank, pos NULLS FIRST)
    WHERE coalesce(lock_key, limit_key, rate_key) IS NOT NULL;

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (16, 'lanes', false);
