//! What plugins do, for operators: counters that live as long as the process,
//! shared by all cores and changed without a lock.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use super::{Cause, PluginError};

/// Buckets of call times: bucket n holds times below 2^n microseconds.
const BUCKETS: usize = 24;

/// Counters of one plugin, by name.
#[derive(Default)]
pub struct Stats {
    calls: AtomicU64,
    errors: [AtomicU64; Cause::ALL.len()],
    times: [AtomicU64; BUCKETS],
    /// Messages delivered, skipped, held, dead-lettered, by verdict.
    pub delivered: AtomicU64,
    /// See `delivered`.
    pub skipped: AtomicU64,
    /// See `delivered`.
    pub held: AtomicU64,
    /// See `delivered`.
    pub dead_lettered: AtomicU64,
    /// Candidates offered to it.
    pub offered: AtomicU64,
    /// Candidates it named.
    pub chosen: AtomicU64,
    last_error: Mutex<Option<String>>,
}

impl Stats {
    /// A call that was answered.
    pub fn called(&self, took: Duration) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let us = (took.as_micros() as u64).max(1);
        let bucket = (64 - us.leading_zeros() as usize).min(BUCKETS - 1);
        self.times[bucket].fetch_add(1, Ordering::Relaxed);
    }

    /// A call that failed.
    pub fn failed(&self, error: &PluginError) {
        let at = Cause::ALL.iter().position(|cause| *cause == error.cause).unwrap_or(0);
        self.errors[at].fetch_add(1, Ordering::Relaxed);
        *self.last_error.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error.text.clone());
    }

    /// A quantile of the answered calls' times, in microseconds, to a factor of two.
    fn quantile(&self, q: f64) -> Option<u64> {
        let counts: Vec<u64> = self.times.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        let mut rank = (total as f64 * q).ceil() as u64;
        for (n, count) in counts.iter().enumerate() {
            if rank <= *count && total > 0 {
                return Some(1 << n);
            }
            rank -= count;
        }
        None
    }

    /// For `GET /api/v1/plugins`.
    pub fn to_json(&self) -> Value {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let errors: serde_json::Map<String, Value> = Cause::ALL
            .iter()
            .zip(&self.errors)
            .map(|(cause, count)| (cause.name().to_owned(), load(count).into()))
            .collect();
        json!({
            "calls": load(&self.calls), "errors": errors,
            "lastError": *self.last_error.lock().unwrap_or_else(std::sync::PoisonError::into_inner),
            "callTimeUs": {"p50": self.quantile(0.5), "p99": self.quantile(0.99)},
            "verdicts": {"deliver": load(&self.delivered), "skip": load(&self.skipped), "hold": load(&self.held),
                "deadLetter": load(&self.dead_lettered)},
            "candidates": {"offered": load(&self.offered), "chosen": load(&self.chosen)},
        })
    }

    /// For Prometheus.
    pub fn to_prometheus(&self, plugin: &str, out: &mut String) {
        use std::fmt::Write;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let _ = writeln!(out, "waspmq_plugin_calls_total{{plugin=\"{plugin}\"}} {}", load(&self.calls));
        for (cause, count) in Cause::ALL.iter().zip(&self.errors) {
            let _ = writeln!(
                out,
                "waspmq_plugin_errors_total{{plugin=\"{plugin}\",cause=\"{}\"}} {}",
                cause.name(),
                load(count)
            );
        }
        for (verdict, count) in [
            ("deliver", &self.delivered),
            ("skip", &self.skipped),
            ("hold", &self.held),
            ("dead_letter", &self.dead_lettered),
        ] {
            let _ = writeln!(
                out,
                "waspmq_plugin_verdicts_total{{plugin=\"{plugin}\",verdict=\"{verdict}\"}} {}",
                load(count)
            );
        }
        let mut below = 0;
        for (n, count) in self.times.iter().enumerate() {
            below += load(count);
            let _ = writeln!(
                out,
                "waspmq_plugin_call_seconds_bucket{{plugin=\"{plugin}\",le=\"{}\"}} {below}",
                (1u64 << n) as f64 / 1e6
            );
        }
        let _ = writeln!(out, "waspmq_plugin_call_seconds_bucket{{plugin=\"{plugin}\",le=\"+Inf\"}} {below}");
        let _ = writeln!(out, "waspmq_plugin_call_seconds_count{{plugin=\"{plugin}\"}} {below}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_fall_into_their_buckets() {
        let stats = Stats::default();
        assert_eq!(stats.quantile(0.5), None);
        for us in [1, 3, 3, 3, 900] {
            stats.called(Duration::from_micros(us));
        }
        assert_eq!((stats.quantile(0.5), stats.quantile(0.99)), (Some(4), Some(1024)));
    }
}
