-- The broker's tables and the functions of its data plane.
--
-- A message's address is (partition, offset). One push appends one row of
-- `segment` per partition it names (more only when it is large), whatever the
-- number of messages; consuming is one row of `consumer_cursor` per (partition, group).
-- No message has a row of its own, except in `dead_letter`.
--
-- Locks. Partition rows are locked in ascending id order, cursor rows in
-- ascending (partition_id, group_name) order, and partition rows before cursor
-- rows, everywhere. The functions of the data plane never wait for a row that
-- somebody else holds: they report it as busy and the broker comes back to it,
-- so that one stuck session cannot hold up a core thread.

CREATE TABLE queue (
    id                          uuid PRIMARY KEY,
    name                        text COLLATE "C" NOT NULL UNIQUE,
    namespace                   text COLLATE "C" NOT NULL,
    task                        text COLLATE "C" NOT NULL,
    created_at                  timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_time                  int NOT NULL DEFAULT 60,        -- s
    retry_limit                 int NOT NULL DEFAULT 3,
    dead_letter_queue           boolean NOT NULL DEFAULT true,
    dlq_after_max_retries       boolean NOT NULL DEFAULT true,
    delayed_processing          int NOT NULL DEFAULT 0,         -- s
    window_buffer               int NOT NULL DEFAULT 0,         -- s
    min_pop_wait_time           int NOT NULL DEFAULT 0,         -- ms
    retention_enabled           boolean NOT NULL DEFAULT false,
    retention_seconds           int NOT NULL DEFAULT 0,
    completed_retention_seconds int NOT NULL DEFAULT 0,
    max_wait_time_seconds       int NOT NULL DEFAULT 0,
    dedup_window_seconds        int NOT NULL DEFAULT 3600,
    encryption_enabled          boolean NOT NULL DEFAULT false,
    priority                    int NOT NULL DEFAULT 0,
    ttl                         int NOT NULL DEFAULT 3600,      -- s; stored and echoed only
    max_size                    int NOT NULL DEFAULT 0,         -- stored and echoed only
    retry_delay                 int NOT NULL DEFAULT 1000       -- ms; stored and echoed only
);
CREATE INDEX queue_namespace_task ON queue (namespace, task);

-- One ordered lane. `next_offset` is the allocator: it is only read or moved
-- under this row's lock, so commit order is offset order.
CREATE TABLE partition (
    id           uuid PRIMARY KEY,
    queue_id     uuid NOT NULL,
    name         text COLLATE "C" NOT NULL,
    next_offset  bigint NOT NULL DEFAULT 0,     -- offset of the next message
    start_offset bigint NOT NULL DEFAULT 0,     -- lowest retained offset
    last_at      timestamptz NOT NULL DEFAULT '-infinity',   -- newest segment's created_at
    -- When it was last written, to about a minute: it is indexed, so that "what
    -- was written recently" is a short index walk, and moves rarely, so that the
    -- other updates of the row stay HOT.
    written_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (queue_id, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500,
        autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.2, vacuum_truncate = off);
CREATE INDEX partition_written_at ON partition (written_at);

-- Immutable run of messages of one partition, written by one commit.
CREATE TABLE segment (
    partition_id uuid NOT NULL,
    base_offset  bigint NOT NULL,
    count        int NOT NULL,
    raw_bytes    int NOT NULL,          -- size of `data` unpacked
    codec        smallint NOT NULL,     -- how `data` is packed
    created_at   timestamptz NOT NULL,  -- taken under the partition's lock: monotone in offset
    hashes       bytea NOT NULL,        -- 16 bytes of xxh3-128 per message's transaction id, in offset order
    data         bytea NOT NULL,        -- the messages' frames
    PRIMARY KEY (partition_id, base_offset)
) WITH (autovacuum_vacuum_insert_scale_factor = 0.5);
-- Already compressed by the broker.
ALTER TABLE segment ALTER COLUMN data SET STORAGE EXTERNAL;
ALTER TABLE segment ALTER COLUMN hashes SET STORAGE EXTERNAL;

-- A consumer group's position in one partition, and its lease there.
CREATE TABLE consumer_cursor (
    partition_id     uuid NOT NULL,
    group_name       text COLLATE "C" NOT NULL,
    committed        bigint NOT NULL,       -- last finished offset
    batch_end        bigint,                -- last offset of the leased span; kept when the lease expires
    lease_id         uuid,
    lease_expires_at timestamptz,
    retry_count      int NOT NULL DEFAULT 0,    -- explicit failures charged to `retry_offset`
    retry_offset     bigint NOT NULL DEFAULT -1,
    delivered_end    bigint NOT NULL DEFAULT -1,    -- highest offset ever delivered
    attempt          int NOT NULL DEFAULT 0,    -- deliveries of the current batch
    consumed         bigint NOT NULL DEFAULT 0, -- messages finished, ever
    served_at        timestamptz,               -- last time something was delivered
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (partition_id, group_name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500,
        autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.2, vacuum_truncate = off);
CREATE INDEX consumer_cursor_group ON consumer_cursor (group_name);

-- Where a group starts in a queue; written once, by its first contact.
CREATE TABLE subscription (
    queue_id   uuid NOT NULL,
    group_name text COLLATE "C" NOT NULL,
    mode       text NOT NULL CHECK (mode IN ('all', 'new', 'time')),
    start_at   timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (queue_id, group_name)
);

CREATE TABLE dead_letter (
    id                  uuid PRIMARY KEY,
    partition_id        uuid NOT NULL,
    group_name          text COLLATE "C" NOT NULL,
    message_offset      bigint NOT NULL,
    message_id          uuid NOT NULL,
    transaction_id      text NOT NULL,
    transaction_hash    bytea NOT NULL,
    trace_id            uuid,
    producer_sub        text,
    payload             bytea NOT NULL,     -- byte for byte: jsonb would refuse \u0000
    error               text NOT NULL,
    retry_count         int NOT NULL,
    created_at          timestamptz NOT NULL,
    failed_at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (partition_id, group_name, message_offset)
);
CREATE INDEX dead_letter_failed_at ON dead_letter (failed_at DESC, id DESC);
CREATE INDEX dead_letter_transaction ON dead_letter (partition_id, transaction_hash);

-- Brokers of this database, so that hints are only sent while there is somebody to hear them.
CREATE TABLE broker (
    id         uuid PRIMARY KEY,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Moves with every change of a queue's options and every deletion, so that all brokers notice.
CREATE TABLE catalog (
    version bigint NOT NULL
);
INSERT INTO catalog VALUES (1);

-- The cursor position just below the first segment committed at or after a time; the end if there is none.
CREATE FUNCTION committed_before(p_partition uuid, p_at timestamptz, p_next_offset bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce(
        (SELECT s.base_offset FROM segment s
         WHERE s.partition_id = p_partition AND s.created_at >= p_at
         ORDER BY s.base_offset LIMIT 1), p_next_offset) - 1
$$;

-- Makes the queues and partitions that are missing and returns all of them, in
-- request order. New ids are the caller's. Waits only for other callers that
-- make the same name at this moment.
CREATE FUNCTION resolve_partitions(
    p_queue text[], p_queue_id uuid[], p_namespace text[], p_task text[], p_partition text[], p_partition_id uuid[])
RETURNS TABLE (item int, queue_id uuid, partition_id uuid, next_offset bigint, dedup_window_seconds int)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO queue (id, name, namespace, task)
    SELECT DISTINCT ON (i.name) i.id, i.name, i.namespace, i.task
    FROM unnest(p_queue, p_queue_id, p_namespace, p_task) AS i(name, id, namespace, task)
    WHERE NOT EXISTS (SELECT 1 FROM queue q WHERE q.name = i.name)
    ORDER BY i.name
    ON CONFLICT (name) DO NOTHING;

    INSERT INTO partition (id, queue_id, name)
    SELECT DISTINCT ON (q.id, i.name) i.id, q.id, i.name
    FROM unnest(p_queue, p_partition, p_partition_id) AS i(queue, name, id)
    JOIN queue q ON q.name = i.queue
    WHERE NOT EXISTS (SELECT 1 FROM partition p WHERE p.queue_id = q.id AND p.name = i.name)
    ORDER BY q.id, i.name
    ON CONFLICT (queue_id, name) DO NOTHING;

    RETURN QUERY
    SELECT i.ord::int, q.id, p.id, p.next_offset, q.dedup_window_seconds
    FROM unnest(p_queue, p_partition) WITH ORDINALITY AS i(queue, name, ord)
    JOIN queue q ON q.name = i.queue
    JOIN partition p ON p.queue_id = q.id AND p.name = i.name
    ORDER BY i.ord;
END $$;

-- Appends segments to partitions, all in one commit, or nothing.
--
-- p_*: the partitions, distinct and ascending by id. `p_known`: the caller has
-- seen the hash of every message below this offset that is inside the
-- deduplication window and vouches that none of the new ones is among them; what was appended since is
-- compared here, under the lock. NULL: no deduplication.
-- s_*: the segments; `s_lane` is an index into p_*, `s_base` its base offset
-- relative to the partition's next one.
--
-- Returns one row per partition. verdict: 'stored' (base_offset, created_at;
-- gap: the hashes between p_known and base_offset, in order, when there were
-- any and all of them are inside the window), or, when nothing was written:
-- 'gone' (no such partition), 'busy' (locked elsewhere), 'stale' (too much was
-- appended since p_known: load it first), 'duplicate' (one row per duplicate:
-- `message` is its index among the partition's new messages, base_offset the
-- original's offset), 'held' (this partition was fine).
-- Locks the partition rows until commit.
CREATE FUNCTION push(
    p_id uuid[], p_known bigint[], p_count int[],
    s_lane int[], s_base int[], s_count int[], s_raw int[], s_codec smallint[], s_hashes bytea[], s_data bytea[])
RETURNS TABLE (lane int, verdict text, base_offset bigint, created_at timestamptz, message int, gap bytea)
LANGUAGE plpgsql
SET enable_hashjoin = on AS $$
#variable_conflict use_column
DECLARE
    v_next   bigint[];
    v_window int[];
    v_locked int;
    v_gap    boolean;
    v_gaps   bytea[];
    v_now    timestamptz;
BEGIN
    SELECT array_agg(l.next_offset ORDER BY l.ord), array_agg(q.dedup_window_seconds ORDER BY l.ord), count(*),
           bool_or(p_known[l.ord] < l.next_offset AND q.dedup_window_seconds > 0)
    INTO v_next, v_window, v_locked, v_gap
    FROM (SELECT i.ord, p.queue_id, p.next_offset
          FROM unnest(p_id) WITH ORDINALITY AS i(id, ord)
          JOIN partition p ON p.id = i.id
          ORDER BY p.id
          FOR NO KEY UPDATE OF p SKIP LOCKED) l
    JOIN queue q ON q.id = l.queue_id;

    IF v_locked < cardinality(p_id) THEN
        RETURN QUERY
        SELECT i.ord::int, CASE WHEN q.id IS NULL THEN 'gone' ELSE 'busy' END, NULL::bigint, NULL::timestamptz, NULL::int, NULL::bytea
        FROM unnest(p_id) WITH ORDINALITY AS i(id, ord)
        LEFT JOIN partition p ON p.id = i.id
        LEFT JOIN queue q ON q.id = p.queue_id
        WHERE q.id IS NULL
           OR NOT EXISTS (SELECT 1 FROM partition f WHERE f.id = i.id FOR NO KEY UPDATE OF f SKIP LOCKED);
        -- Whoever held the rows has let go meanwhile: the call can simply be repeated.
        IF NOT FOUND THEN
            RETURN QUERY SELECT 1, 'busy'::text, NULL::bigint, NULL::timestamptz, NULL::int, NULL::bytea;
        END IF;
        RETURN;
    END IF;

    v_now := clock_timestamp();
    IF v_gap THEN
        IF EXISTS (SELECT 1 FROM unnest(p_known, v_next, v_window) AS g(known, next, secs)
                   WHERE g.secs > 0 AND g.next - g.known > 5000) THEN
            RETURN QUERY
            SELECT g.ord::int, CASE WHEN g.secs > 0 AND g.next - g.known > 5000 THEN 'stale' ELSE 'held' END,
                   NULL::bigint, NULL::timestamptz, NULL::int, NULL::bytea
            FROM unnest(p_known, v_next, v_window) WITH ORDINALITY AS g(known, next, secs, ord);
            RETURN;
        END IF;

        RETURN QUERY
        WITH old AS MATERIALIZED (
            SELECT g.ord, s.base_offset + k.n AS message_offset, substring(s.hashes FROM k.n * 16 + 1 FOR 16) AS hash
            FROM unnest(p_id, p_known, v_next, v_window) WITH ORDINALITY AS g(id, known, next, secs, ord)
            JOIN segment s ON s.partition_id = g.id AND s.base_offset >= g.known
                AND s.created_at > v_now - make_interval(secs => g.secs)
            CROSS JOIN LATERAL generate_series(0, s.count - 1) AS k(n)
            WHERE g.secs > 0 AND g.known < g.next
        ), new AS MATERIALIZED (
            SELECT s.lane AS ord, s.base + k.n AS message, substring(s.hashes FROM k.n * 16 + 1 FOR 16) AS hash
            FROM unnest(s_lane, s_base, s_count, s_hashes) AS s(lane, base, count, hashes)
            CROSS JOIN LATERAL generate_series(0, s.count - 1) AS k(n)
        )
        SELECT n.ord, 'duplicate'::text, min(o.message_offset), NULL::timestamptz, n.message, NULL::bytea
        FROM new n JOIN old o ON o.ord = n.ord AND o.hash = n.hash
        GROUP BY n.ord, n.message;
        IF FOUND THEN
            RETURN;
        END IF;

        -- What the caller has not seen, so that it need not be compared again.
        -- Only where no segment is missing in between (dropped by retention).
        SELECT array_agg(x.gap ORDER BY x.ord) INTO v_gaps
        FROM (SELECT g.ord, CASE WHEN g.secs > 0 AND g.known < g.next
                THEN (SELECT CASE WHEN sum(s.count) = g.next - g.known THEN string_agg(s.hashes, ''::bytea ORDER BY s.base_offset) END
                      FROM segment s WHERE s.partition_id = g.id AND s.base_offset >= g.known) END AS gap
              FROM unnest(p_id, p_known, v_next, v_window) WITH ORDINALITY AS g(id, known, next, secs, ord)) x;
    END IF;

    RETURN QUERY
    WITH u AS (
        UPDATE partition p
        SET next_offset = p.next_offset + i.count,
            last_at = greatest(p.last_at, v_now),
            written_at = CASE WHEN p.written_at < v_now - interval '1 minute' THEN v_now ELSE p.written_at END
        FROM unnest(p_id, p_count) WITH ORDINALITY AS i(id, count, ord)
        WHERE p.id = i.id
        RETURNING i.ord::int AS lane, p.id, p.next_offset - i.count AS base, p.last_at
    ), s AS (
        INSERT INTO segment (partition_id, base_offset, count, raw_bytes, codec, created_at, hashes, data)
        SELECT u.id, u.base + s.base, s.count, s.raw, s.codec, u.last_at, s.hashes, s.data
        FROM unnest(s_lane, s_base, s_count, s_raw, s_codec, s_hashes, s_data)
             AS s(lane, base, count, raw, codec, hashes, data)
        JOIN u ON u.lane = s.lane
    )
    SELECT u.lane, 'stored'::text, u.base, u.last_at, NULL::int, v_gaps[u.lane] FROM u;
END $$;

-- Claims messages for any number of pops at once.
--
-- q_*: the pops: group, lease id, most messages, most partitions, lease in
-- seconds (NULL: the queue's), whether to commit at once. c_*: the candidates,
-- each for one pop (`c_pop` is an index into q_*), in the order to try; a
-- (partition, group) at most once per call.
--
-- Returns, per candidate, one row per segment of the claimed span ('took'), or
-- one row that says why there is none: 'empty', 'leased' (until wait_ms from
-- now), 'later' (messages there, none visible before wait_ms), 'unreached' (its
-- pop was full), 'gone' (no such partition), 'busy' (locked elsewhere),
-- 'new' (the group has no cursor there).
-- Locks the cursor rows that it claims until commit; skips rows that are locked.
CREATE FUNCTION claim(
    q_group text[], q_lease uuid[], q_batch int[], q_partitions int[], q_lease_seconds int[], q_auto boolean[],
    c_pop int[], c_partition uuid[])
RETURNS TABLE (
    candidate int, verdict text, partition_name text, first_offset bigint, end_offset bigint, attempt int, wait_ms bigint, remaining bigint,
    base_offset bigint, count int, created_at timestamptz, codec smallint, hashes bytea, data bytea)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
    -- Most unpacked bytes one pop is given, unless its first segment alone is larger.
    c_bytes CONSTANT bigint := 32 * 1024 * 1024;
BEGIN
    RETURN QUERY
    WITH c AS MATERIALIZED (
        SELECT i.ord::int AS candidate, i.pop, i.id, q_group[i.pop] AS group_name
        FROM unnest(c_pop, c_partition) WITH ORDINALITY AS i(pop, id, ord)
    ), k AS MATERIALIZED (
        SELECT c.candidate, c.pop, k.partition_id, k.group_name, k.committed
        FROM c JOIN consumer_cursor k ON k.partition_id = c.id AND k.group_name = c.group_name
        WHERE k.lease_id IS NULL OR k.lease_expires_at <= v_now
        FOR UPDATE OF k SKIP LOCKED
    ), w AS MATERIALIZED (
        SELECT k.candidate, k.pop, k.partition_id, k.group_name, p.name, p.next_offset, f.first_offset,
               q.lease_time, q.delayed_processing,
               greatest(p.next_offset - f.first_offset, 0) AS available,
               CASE WHEN (q.delayed_processing > 0 OR q.window_buffer > 0) AND p.next_offset > f.first_offset THEN
                   (SELECT greatest(
                        s.created_at + make_interval(secs => q.delayed_processing),
                        CASE WHEN p.next_offset - f.first_offset < 100 THEN s.created_at + make_interval(secs => q.window_buffer) END)
                    FROM segment s
                    WHERE s.partition_id = k.partition_id AND s.base_offset <= f.first_offset
                    ORDER BY s.base_offset DESC LIMIT 1)
               END AS visible_at
        FROM k
        JOIN partition p ON p.id = k.partition_id
        JOIN queue q ON q.id = p.queue_id
        CROSS JOIN LATERAL (SELECT greatest(k.committed + 1, p.start_offset) AS first_offset) f
    ), b AS MATERIALIZED (
        SELECT x.*, least(x.available, q_batch[x.pop] - x.before) AS take
        FROM (SELECT w.*,
                     coalesce(sum(w.available) OVER earlier, 0)::bigint AS before,
                     coalesce(count(*) OVER earlier, 0) AS lanes
              FROM w
              WHERE w.available > 0 AND (w.visible_at IS NULL OR w.visible_at <= v_now)
              WINDOW earlier AS (PARTITION BY w.pop ORDER BY w.candidate ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) x
        WHERE x.before < q_batch[x.pop] AND x.lanes < q_partitions[x.pop]
    ), s AS MATERIALIZED (
        SELECT x.*, sum(x.raw_bytes) OVER (PARTITION BY x.pop ORDER BY x.candidate, x.base_offset) - x.raw_bytes AS bytes_before
        FROM (SELECT b.candidate, b.pop, b.first_offset, b.take,
                     s.base_offset, s.count, s.raw_bytes, s.created_at, s.codec, s.hashes, s.data
              FROM b
              JOIN segment s ON s.partition_id = b.partition_id
                  AND s.base_offset < b.first_offset + b.take
                  AND s.base_offset >= coalesce((SELECT max(h.base_offset) FROM segment h
                                                 WHERE h.partition_id = b.partition_id AND h.base_offset <= b.first_offset), 0)
                  AND (b.delayed_processing = 0 OR s.created_at <= v_now - make_interval(secs => b.delayed_processing))) x
    ), e AS MATERIALIZED (
        SELECT s.candidate, max(least(s.base_offset + s.count, s.first_offset + s.take)) - 1 AS end_offset
        FROM s WHERE s.bytes_before < c_bytes
        GROUP BY s.candidate
    ), u AS (
        UPDATE consumer_cursor k
        SET committed = CASE WHEN q_auto[b.pop] THEN e.end_offset ELSE k.committed END,
            batch_end = CASE WHEN q_auto[b.pop] THEN NULL ELSE e.end_offset END,
            lease_id = CASE WHEN q_auto[b.pop] THEN NULL ELSE q_lease[b.pop] END,
            lease_expires_at = CASE WHEN q_auto[b.pop] THEN NULL
                ELSE v_now + make_interval(secs => coalesce(q_lease_seconds[b.pop], b.lease_time)) END,
            attempt = CASE WHEN NOT q_auto[b.pop] AND b.first_offset <= k.delivered_end THEN k.attempt + 1 ELSE 1 END,
            delivered_end = greatest(k.delivered_end, e.end_offset),
            retry_count = CASE WHEN q_auto[b.pop] AND e.end_offset >= k.retry_offset THEN 0 ELSE k.retry_count END,
            consumed = k.consumed + CASE WHEN q_auto[b.pop] THEN e.end_offset - b.first_offset + 1 ELSE 0 END,
            served_at = v_now
        FROM e JOIN b ON b.candidate = e.candidate
        WHERE k.partition_id = b.partition_id AND k.group_name = b.group_name
        RETURNING b.candidate, b.name, k.attempt, e.end_offset, b.next_offset,
                  (extract(epoch FROM k.lease_expires_at - v_now) * 1000)::bigint AS lease_ms
    )
    SELECT u.candidate, 'took'::text, u.name, s.first_offset, u.end_offset, u.attempt, u.lease_ms, u.next_offset - 1 - u.end_offset,
           s.base_offset, s.count, s.created_at, s.codec, s.hashes, s.data
    FROM u JOIN s ON s.candidate = u.candidate AND s.base_offset <= u.end_offset
    UNION ALL
    SELECT c.candidate,
           CASE WHEN p.id IS NULL THEN 'gone'
                WHEN k0.partition_id IS NULL THEN 'new'
                WHEN w.candidate IS NULL AND k0.lease_id IS NOT NULL AND k0.lease_expires_at > v_now THEN 'leased'
                WHEN w.candidate IS NULL THEN 'busy'
                WHEN w.available = 0 THEN 'empty'
                WHEN w.visible_at > v_now THEN 'later'
                -- Within budget, yet no segment is there: something other than the broker removed it.
                WHEN b.candidate IS NOT NULL AND NOT EXISTS (SELECT 1 FROM s WHERE s.candidate = c.candidate) THEN 'later'
                ELSE 'unreached' END,
           p.name, NULL, NULL, NULL,
           CASE WHEN w.candidate IS NULL THEN (extract(epoch FROM k0.lease_expires_at - v_now) * 1000)::bigint
                WHEN w.visible_at > v_now THEN (extract(epoch FROM w.visible_at - v_now) * 1000)::bigint
                ELSE 1000 END,
           w.available, NULL, NULL, NULL, NULL, NULL, NULL
    FROM c
    LEFT JOIN partition p ON p.id = c.id
    LEFT JOIN consumer_cursor k0 ON k0.partition_id = c.id AND k0.group_name = c.group_name
    LEFT JOIN w ON w.candidate = c.candidate
    LEFT JOIN b ON b.candidate = c.candidate
    WHERE NOT EXISTS (SELECT 1 FROM u WHERE u.candidate = c.candidate)
    ORDER BY 1, 9;
END $$;

-- Gives back what a claim took and nobody received: the lease ends as if it had
-- never been, the delivery does not count. Locks the cursor rows until commit.
CREATE FUNCTION unclaim(p_partition uuid[], p_group text[], p_lease uuid[]) RETURNS int
LANGUAGE sql AS $$
    WITH l AS MATERIALIZED (
        SELECT k.partition_id, k.group_name
        FROM unnest(p_partition, p_group, p_lease) AS i(id, grp, lease)
        JOIN consumer_cursor k ON k.partition_id = i.id AND k.group_name = i.grp AND k.lease_id = i.lease
        ORDER BY 1, 2
        FOR UPDATE OF k
    ), u AS (
        UPDATE consumer_cursor k
        SET lease_id = NULL, lease_expires_at = NULL, batch_end = NULL, attempt = greatest(k.attempt - 1, 0)
        FROM l WHERE k.partition_id = l.partition_id AND k.group_name = l.group_name
        RETURNING 1
    )
    SELECT count(*)::int FROM u
$$;

-- Commits offsets, and settles failures, for any number of (partition, group)s.
--
-- g_*: the (partition, group)s, distinct; `g_lease` NULL: no lease is named and
-- none is asked for. i_*: what is said of which offset (`i_group`: index into
-- g_*): 0 completed, 1 retry, 2 failed, 3 dead-letter. x_*: snapshots of
-- messages that may have to be dead-lettered.
--
-- Returns one row per g: verdict 'applied', 'missing' (no cursor), 'lease' (the
-- named lease is not the live one), 'busy' (locked elsewhere), 'snapshot' (the
-- message at signal_offset has to be dead-lettered and its snapshot was not
-- given); only 'applied' changed anything. `action`: 0 none, 1 released, 2
-- charged, 3 dead-lettered, 4 dropped.
-- Locks the cursor rows until commit.
CREATE FUNCTION ack(
    g_partition uuid[], g_name text[], g_lease uuid[],
    i_group int[], i_offset bigint[], i_status smallint[],
    x_group int[], x_offset bigint[], x_id uuid[], x_message uuid[], x_transaction text[], x_hash bytea[],
    x_trace uuid[], x_sub text[], x_payload bytea[], x_error text[], x_created timestamptz[])
RETURNS TABLE (
    item int, verdict text, queue_name text, before bigint, after bigint, span_end bigint, released boolean,
    signal_offset bigint, action smallint, pending boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    WITH g AS MATERIALIZED (
        SELECT i.ord::int AS item, i.id, i.name, i.lease
        FROM unnest(g_partition, g_name, g_lease) WITH ORDINALITY AS i(id, name, lease, ord)
    ), l AS MATERIALIZED (
        SELECT g.item, g.lease, k.partition_id, k.group_name, k.committed, k.batch_end, k.lease_id,
               k.lease_expires_at, k.retry_count, k.retry_offset
        FROM g JOIN consumer_cursor k ON k.partition_id = g.id AND k.group_name = g.name
        ORDER BY k.partition_id, k.group_name
        FOR UPDATE OF k SKIP LOCKED
    ), o AS MATERIALIZED (
        SELECT l.*, q.name AS queue_name, q.retry_limit, q.dead_letter_queue OR q.dlq_after_max_retries AS dead_letters,
               p.next_offset, coalesce(l.batch_end, p.next_offset - 1) AS span_end,
               l.lease IS NULL OR (l.lease_id = l.lease AND l.lease_expires_at > v_now) AS lease_ok
        FROM l JOIN partition p ON p.id = l.partition_id JOIN queue q ON q.id = p.queue_id
    ), i AS MATERIALIZED (
        SELECT i.item, i.off, i.status
        FROM unnest(i_group, i_offset, i_status) AS i(item, off, status)
        JOIN o ON o.item = i.item AND o.lease_ok AND i.off > o.committed AND i.off <= o.span_end
    ), sig AS MATERIALIZED (
        SELECT DISTINCT ON (i.item) i.item, i.off, i.status FROM i WHERE i.status > 0
        ORDER BY i.item, i.off, i.status DESC
    ), d AS MATERIALIZED (
        SELECT x.*, CASE
                 WHEN x.status IS NULL THEN 0
                 WHEN x.status = 1 THEN 1
                 WHEN x.status = 2 AND x.charged < x.retry_limit THEN 2
                 WHEN x.status = 3 OR x.dead_letters THEN 3
                 ELSE 4 END::smallint AS action
        FROM (SELECT y.*, CASE WHEN y.done >= y.retry_offset THEN 0 ELSE y.retry_count END AS charged
              FROM (SELECT o.*, sig.off AS signal, sig.status,
                           greatest(o.committed, (SELECT max(i.off) FROM i WHERE i.item = o.item AND i.status = 0
                                                  AND (sig.off IS NULL OR i.off < sig.off))) AS done
                    FROM o LEFT JOIN sig ON sig.item = o.item
                    WHERE o.lease_ok) y) x
    ), f AS MATERIALIZED (
        SELECT d.*, CASE WHEN d.action >= 3 THEN d.signal ELSE d.done END AS target,
               d.action = 3 AND NOT EXISTS (SELECT 1 FROM unnest(x_group, x_offset) AS x(item, off)
                                            WHERE x.item = d.item AND x.off = d.signal) AS wanting
        FROM d
    ), dl AS (
        INSERT INTO dead_letter (id, partition_id, group_name, message_offset, message_id, transaction_id, transaction_hash,
                                 trace_id, producer_sub, payload, error, retry_count, created_at, failed_at)
        SELECT x.id, f.partition_id, f.group_name, f.signal, x.message, x.transaction, x.hash, x.trace, x.sub, x.payload,
               x.error, f.charged, x.created, v_now
        FROM f
        JOIN unnest(x_group, x_offset, x_id, x_message, x_transaction, x_hash, x_trace, x_sub, x_payload, x_error, x_created)
             AS x(item, off, id, message, transaction, hash, trace, sub, payload, error, created)
          ON x.item = f.item AND x.off = f.signal
        WHERE f.action = 3
        ON CONFLICT (partition_id, group_name, message_offset) DO NOTHING
    ), u AS (
        UPDATE consumer_cursor k
        SET committed = f.target,
            consumed = k.consumed + (f.target - k.committed),
            batch_end = CASE WHEN r.released THEN NULL ELSE k.batch_end END,
            lease_id = CASE WHEN r.released THEN NULL ELSE k.lease_id END,
            lease_expires_at = CASE WHEN r.released THEN NULL ELSE k.lease_expires_at END,
            retry_count = CASE WHEN f.action = 2 THEN f.charged + 1
                               WHEN f.target >= k.retry_offset THEN 0
                               ELSE k.retry_count END,
            retry_offset = CASE WHEN f.action = 2 THEN f.signal ELSE k.retry_offset END
        FROM f CROSS JOIN LATERAL (SELECT f.action > 0 OR f.target >= f.batch_end AS released) r
        WHERE k.partition_id = f.partition_id AND k.group_name = f.group_name
          AND NOT f.wanting AND (f.action > 0 OR f.target > f.committed)
    )
    SELECT g.item,
           CASE WHEN f.wanting THEN 'snapshot'
                WHEN f.item IS NOT NULL THEN 'applied'
                WHEN o.item IS NOT NULL THEN 'lease'
                WHEN EXISTS (SELECT 1 FROM consumer_cursor k JOIN partition p ON p.id = k.partition_id
                             WHERE k.partition_id = g.id AND k.group_name = g.name) THEN 'busy'
                ELSE 'missing' END,
           o.queue_name, f.committed, f.target, f.span_end,
           coalesce(f.action > 0 OR f.target >= f.batch_end, false), f.signal, f.action, o.next_offset - 1 > f.target
    FROM g LEFT JOIN o ON o.item = g.item LEFT JOIN f ON f.item = g.item
    ORDER BY g.item;
END $$;

-- Renews live leases; never shortens one. Returns the renewed rows.
-- Locks the cursor rows until commit.
CREATE FUNCTION extend_lease(p_lease uuid, p_partition uuid[], p_group text, p_seconds int)
RETURNS TABLE (partition_id uuid, lease_expires_at timestamptz)
LANGUAGE sql AS $$
    WITH l AS MATERIALIZED (
        SELECT k.partition_id, k.group_name
        FROM consumer_cursor k
        WHERE k.partition_id = ANY (p_partition) AND k.group_name = p_group
          AND k.lease_id = p_lease AND k.lease_expires_at > clock_timestamp()
        ORDER BY 1, 2
        FOR UPDATE
    )
    UPDATE consumer_cursor k
    SET lease_expires_at = greatest(k.lease_expires_at, clock_timestamp() + make_interval(secs => p_seconds))
    FROM l WHERE k.partition_id = l.partition_id AND k.group_name = l.group_name
    RETURNING k.partition_id, k.lease_expires_at
$$;

-- First contact of a group with a queue: stores the subscription and seeds a
-- cursor in every partition, once. Later calls, also racing ones, change nothing.
-- Waits for a racing first contact to finish.
CREATE FUNCTION subscribe(p_queue uuid, p_group text, p_mode text, p_at timestamptz) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO subscription (queue_id, group_name, mode, start_at)
    VALUES (p_queue, p_group, p_mode, CASE WHEN p_mode = 'new' THEN clock_timestamp() ELSE p_at END)
    ON CONFLICT (queue_id, group_name) DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO consumer_cursor (partition_id, group_name, committed)
    SELECT p.id, p_group,
           CASE p_mode WHEN 'all' THEN p.start_offset - 1
                       WHEN 'new' THEN p.next_offset - 1
                       ELSE committed_before(p.id, p_at, p.next_offset) END
    FROM partition p
    WHERE p.queue_id = p_queue
    ORDER BY p.id
    ON CONFLICT (partition_id, group_name) DO NOTHING;
    RETURN true;
END $$;

-- Makes the missing cursors of groups in partitions. Where the group has a
-- subscription to the queue, that decides: a partition without a cursor is
-- younger than the subscription, so everything in it is new to the group. Where
-- it has none (targeted pops), the caller's own start decides.
CREATE FUNCTION seed_cursors(p_partition uuid[], p_group text[], p_mode text[], p_at timestamptz[]) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO consumer_cursor (partition_id, group_name, committed)
    SELECT p.id, i.grp,
           CASE coalesce(nullif(s.mode, 'new'), CASE WHEN s.mode IS NULL THEN i.mode ELSE 'all' END)
               WHEN 'all' THEN p.start_offset - 1
               WHEN 'new' THEN p.next_offset - 1
               ELSE committed_before(p.id, coalesce(s.start_at, i.at), p.next_offset) END
    FROM unnest(p_partition, p_group, p_mode, p_at) AS i(id, grp, mode, at)
    JOIN partition p ON p.id = i.id
    LEFT JOIN subscription s ON s.queue_id = p.queue_id AND s.group_name = i.grp
    ORDER BY p.id, i.grp
    ON CONFLICT (partition_id, group_name) DO NOTHING
$$;

-- Deletes a queue with all its partitions, messages, cursors, subscriptions and
-- dead letters. A push that resolved its partition before finds it gone.
CREATE FUNCTION delete_queue(p_name text) RETURNS boolean
LANGUAGE plpgsql SET enable_hashjoin = on AS $$
DECLARE
    v_queue uuid;
    v_partitions uuid[];
BEGIN
    DELETE FROM queue WHERE name = p_name RETURNING id INTO v_queue;
    IF v_queue IS NULL THEN
        RETURN false;
    END IF;
    SELECT array_agg(l.id) INTO v_partitions
    FROM (SELECT p.id FROM partition p WHERE p.queue_id = v_queue ORDER BY p.id FOR UPDATE) l;
    PERFORM 1 FROM consumer_cursor k WHERE k.partition_id = ANY (v_partitions)
        ORDER BY k.partition_id, k.group_name FOR UPDATE;
    DELETE FROM consumer_cursor WHERE partition_id = ANY (v_partitions);
    DELETE FROM dead_letter WHERE partition_id = ANY (v_partitions);
    DELETE FROM segment WHERE partition_id = ANY (v_partitions);
    DELETE FROM partition WHERE id = ANY (v_partitions);
    DELETE FROM subscription WHERE queue_id = v_queue;
    UPDATE catalog SET version = version + 1;
    RETURN true;
END $$;
