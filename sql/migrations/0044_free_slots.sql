-- breaking: no
--
-- A worker may have slots for one queue only. How many of its slots were free did not say where they were. A limit was granted to a job whose
-- queue had none, and other jobs of the limit waited beside idle workers for as long as that queue's job ran.

-- Beside each of its queues, the slots that were free for it at the last heartbeat. NULL: the worker is of a version that does not say.
ALTER TABLE pgqueue.worker ADD COLUMN free integer[];

INSERT INTO pgqueue.migration (version, name, breaking) VALUES (44, 'free_slots', false);
