//! Counters, as Prometheus sees them.

use prometheus::{IntCounter, Registry, TextEncoder};

macro_rules! counters {
    ($($field:ident: $name:literal, $help:literal;)*) => {
        /// All counters of the broker. They only go up, and start at 0 with the process.
        pub struct Metrics {
            registry: Registry,
            $(#[doc = $help] pub $field: IntCounter,)*
        }

        impl Default for Metrics {
            fn default() -> Self {
                let registry = Registry::new();
                $(
                    let $field = IntCounter::new(concat!("waspmq_", $name), $help).expect("the name is valid");
                    registry.register(Box::new($field.clone())).expect("the name is used once");
                )*
                Self { registry, $($field,)* }
            }
        }
    };
}

counters! {
    requests: "http_requests_total", "HTTP requests received.";
    pushes: "pushes_total", "Push calls answered 201.";
    pushed_messages: "pushed_messages_total", "Messages stored.";
    push_commits: "push_commits_total", "Commits made for pushes.";
    pops: "pops_total", "Pops answered with messages.";
    pop_empty: "pops_empty_total", "Pops answered with nothing.";
    popped_messages: "popped_messages_total", "Messages delivered.";
    claims: "claim_commits_total", "Commits made for pops.";
    trims: "trim_commits_total", "Commits made for what filters left of claims.";
    acks: "acks_total", "Ack calls answered.";
    acked_messages: "acked_messages_total", "Acknowledgements applied.";
    ack_failures: "ack_failures_total", "Acknowledgements refused.";
    ack_commits: "ack_commits_total", "Commits made for acks.";
    dead_letters: "dead_letters_total", "Messages sent to the dead letters.";
    wakes: "wakes_total", "Wakes of waiting pops, of a (queue, group) each.";
    database_errors: "database_errors_total", "Calls to the database that failed.";
}

impl Metrics {
    /// Prometheus' text format.
    pub fn text(&self) -> String {
        TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap_or_default()
    }
}
