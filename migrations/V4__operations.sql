-- Traces, maintenance modes, and what listings need.

-- A consumer's own notes on messages.
CREATE TABLE message_trace (
    id               uuid PRIMARY KEY,
    partition_id     uuid NOT NULL,
    transaction_id   text NOT NULL,
    transaction_hash bytea NOT NULL,
    group_name       text,
    event_type       text NOT NULL,
    data             text NOT NULL,     -- JSON
    names            text[] NOT NULL,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX message_trace_message ON message_trace (partition_id, transaction_hash);
CREATE INDEX message_trace_names ON message_trace USING gin (names);

-- Shared by all brokers of the database.
ALTER TABLE catalog ADD COLUMN push_maintenance boolean NOT NULL DEFAULT false,
                    ADD COLUMN pop_maintenance boolean NOT NULL DEFAULT false;
