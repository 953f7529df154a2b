-- Plugin bindings, and the trim that applies a filter's verdicts to a claim.

-- The queue's own bindings, as JSON text; NULL: none.
ALTER TABLE queue ADD COLUMN selector text, ADD COLUMN filter text;

-- Bindings of a group in a queue; they go before the queue's.
CREATE TABLE plugin_binding (
    queue_id   uuid NOT NULL,
    group_name text COLLATE "C" NOT NULL,
    kind       text NOT NULL CHECK (kind IN ('selector', 'filter')),
    binding    text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (queue_id, group_name, kind)
);

-- What a filter left of claims.
--
-- i_*: the claims, by (partition, group, lease). `i_committed`: the new cursor.
-- `i_end`: last offset that stays leased; NULL: no lease stays. `i_claimed`: last
-- offset that had been claimed. x_*: what goes to the dead letters, `x_item` being
-- an index into i_*.
--
-- Returns, per claim, 'trimmed', 'lost' (the lease is over: nothing was changed) or
-- 'busy' (locked elsewhere, or gone: nothing was changed).
-- Locks the cursor rows until commit; never waits for one.
CREATE FUNCTION trim_claim(
    i_partition uuid[], i_group text[], i_lease uuid[], i_committed bigint[], i_end bigint[], i_claimed bigint[],
    x_item int[], x_offset bigint[], x_id uuid[], x_message uuid[], x_transaction text[], x_hash bytea[],
    x_trace uuid[], x_sub text[], x_payload bytea[], x_error text[], x_created timestamptz[])
RETURNS TABLE (item int, verdict text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    WITH i AS MATERIALIZED (
        SELECT i.ord::int AS item, i.id, i.name, i.lease, i.committed, i.last, i.claimed
        FROM unnest(i_partition, i_group, i_lease, i_committed, i_end, i_claimed)
             WITH ORDINALITY AS i(id, name, lease, committed, last, claimed, ord)
    ), l AS MATERIALIZED (
        SELECT i.item, i.last, i.claimed, greatest(i.committed, k.committed) AS committed, k.partition_id, k.group_name,
               k.retry_count, k.retry_offset, k.lease_id = i.lease AND k.lease_expires_at > v_now AS live
        FROM i JOIN consumer_cursor k ON k.partition_id = i.id AND k.group_name = i.name
        ORDER BY k.partition_id, k.group_name
        FOR UPDATE OF k SKIP LOCKED
    ), d AS (
        INSERT INTO dead_letter (id, partition_id, group_name, message_offset, message_id, transaction_id, transaction_hash,
                                 trace_id, producer_sub, payload, error, retry_count, created_at, failed_at)
        SELECT x.id, l.partition_id, l.group_name, x.off, x.message, x.transaction, x.hash, x.trace, x.sub, x.payload,
               x.error, CASE WHEN l.retry_offset = x.off THEN l.retry_count ELSE 0 END, x.created, v_now
        FROM l
        JOIN unnest(x_item, x_offset, x_id, x_message, x_transaction, x_hash, x_trace, x_sub, x_payload, x_error, x_created)
             AS x(item, off, id, message, transaction, hash, trace, sub, payload, error, created) ON x.item = l.item
        WHERE l.live
        ON CONFLICT (partition_id, group_name, message_offset) DO NOTHING
    ), u AS (
        UPDATE consumer_cursor k
        SET committed = l.committed,
            consumed = k.consumed + (l.committed - k.committed),
            batch_end = l.last,
            lease_id = CASE WHEN l.last IS NULL THEN NULL ELSE k.lease_id END,
            lease_expires_at = CASE WHEN l.last IS NULL THEN NULL ELSE k.lease_expires_at END,
            -- What was claimed and not delivered has not been delivered.
            delivered_end = CASE WHEN k.delivered_end > l.claimed THEN k.delivered_end
                                 ELSE coalesce(l.last, l.committed) END,
            attempt = CASE WHEN l.last IS NULL THEN greatest(k.attempt - 1, 0) ELSE k.attempt END,
            retry_count = CASE WHEN l.committed >= k.retry_offset THEN 0 ELSE k.retry_count END
        FROM l
        WHERE l.live AND k.partition_id = l.partition_id AND k.group_name = l.group_name
    )
    SELECT i.item, CASE WHEN l.item IS NULL THEN 'busy' WHEN l.live THEN 'trimmed' ELSE 'lost' END
    FROM i LEFT JOIN l ON l.item = i.item
    ORDER BY i.item;
END $$;

-- As before, and with the bindings.
CREATE OR REPLACE FUNCTION delete_queue(p_name text) RETURNS boolean
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
    DELETE FROM plugin_binding WHERE queue_id = v_queue;
    UPDATE catalog SET version = version + 1;
    RETURN true;
END $$;
