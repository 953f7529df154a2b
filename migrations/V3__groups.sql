-- Seeking, and deleting groups, in pages, so that no statement holds many rows for long.

-- Moves a group's cursors of one page of a queue's partitions (ids above `p_after`, in id
-- order; or the one partition `p_partition`): to the end (`p_at` NULL) or to just below the
-- first segment committed at or after a time. Makes the missing ones; ends leases, forgets
-- failures and attempts. Returns the page's last id and how many partitions it had.
-- Locks the cursor rows until commit.
CREATE FUNCTION seek(p_queue uuid, p_group text, p_partition uuid, p_at timestamptz, p_after uuid, p_limit int)
RETURNS TABLE (last_id uuid, seen bigint)
LANGUAGE sql AS $$
    WITH p AS MATERIALIZED (
        SELECT p.id, p.next_offset, p.start_offset FROM partition p
        WHERE p.queue_id = p_queue AND (p_partition IS NULL OR p.id = p_partition) AND (p_after IS NULL OR p.id > p_after)
        ORDER BY p.id LIMIT p_limit
    ), moved AS (
        INSERT INTO consumer_cursor AS k (partition_id, group_name, committed)
        SELECT p.id, p_group,
               CASE WHEN p_at IS NULL THEN p.next_offset - 1 ELSE committed_before(p.id, p_at, p.next_offset) END
        FROM p ORDER BY p.id
        ON CONFLICT (partition_id, group_name) DO UPDATE
        SET committed = excluded.committed, batch_end = NULL, lease_id = NULL, lease_expires_at = NULL,
            retry_count = 0, retry_offset = -1, delivered_end = excluded.committed, attempt = 0
    )
    SELECT (SELECT p.id FROM p ORDER BY p.id DESC LIMIT 1), (SELECT count(*) FROM p)
$$;
CREATE INDEX partition_queue_id ON partition (queue_id, id);

-- Deletes one page of a group's cursors (of one queue, or of all). Returns how many.
CREATE FUNCTION delete_cursors(p_queue uuid, p_group text, p_limit int) RETURNS bigint
LANGUAGE sql AS $$
    WITH l AS MATERIALIZED (
        SELECT k.partition_id, k.group_name
        FROM consumer_cursor k JOIN partition p ON p.id = k.partition_id
        WHERE k.group_name = p_group AND (p_queue IS NULL OR p.queue_id = p_queue)
        ORDER BY k.partition_id LIMIT p_limit
        FOR UPDATE OF k
    ), d AS (
        DELETE FROM consumer_cursor k USING l
        WHERE k.partition_id = l.partition_id AND k.group_name = l.group_name RETURNING 1
    )
    SELECT count(*) FROM d
$$;
