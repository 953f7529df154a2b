//! A selector: by the queue's priority and by prefixes of the partition's name, with
//! aging, so that what waits long enough comes before everything else.
//!
//! Settings:
//! - `prefixes`: `vip-:100,batch-:-10`: what a name that starts so adds. The longest match counts.
//! - `aging-ms` (1000): every so many milliseconds of waiting add one.

wit_bindgen::generate!({ path: "../../wit/v1", world: "selector" });

use std::cell::RefCell;

use exports::waspmq::plugin::candidate_selector::{Candidate, Guest, Request};

#[derive(Default)]
struct Settings {
    prefixes: Vec<(String, i64)>,
    aging_ms: u64,
}

thread_local! {
    static SETTINGS: RefCell<Settings> = RefCell::default();
}

struct Priority;

impl Settings {
    fn score(&self, candidate: &Candidate) -> i64 {
        let prefix = self.prefixes.iter().filter(|(prefix, _)| candidate.partition.starts_with(prefix.as_str()));
        let by_name = prefix.max_by_key(|(prefix, _)| prefix.len()).map_or(0, |(_, score)| *score);
        let by_age = i64::try_from(candidate.oldest_age_ms / self.aging_ms).unwrap_or(i64::MAX / 4);
        i64::from(candidate.queue_priority) + by_name + by_age
    }
}

impl Guest for Priority {
    fn init(settings: Vec<(String, String)>) -> Result<(), String> {
        let mut parsed = Settings { prefixes: Vec::new(), aging_ms: 1000 };
        for (key, value) in settings {
            match key.as_str() {
                "aging-ms" => match value.parse() {
                    Ok(ms) if ms > 0 => parsed.aging_ms = ms,
                    _ => return Err(format!("aging-ms must be a whole number above 0, got \"{value}\"")),
                },
                "prefixes" => {
                    for pair in value.split(',').filter(|pair| !pair.trim().is_empty()) {
                        let Some((prefix, score)) = pair.trim().rsplit_once(':') else {
                            return Err(format!("prefixes must be PREFIX:NUMBER,…, got \"{pair}\""));
                        };
                        // Bounded, so that sums cannot overflow.
                        let score: i32 =
                            score.parse().map_err(|_| format!("prefixes: \"{score}\" is not a whole number"))?;
                        parsed.prefixes.push((prefix.to_owned(), score.into()));
                    }
                }
                other => return Err(format!("priority has the settings prefixes and aging-ms, got \"{other}\"")),
            }
        }
        SETTINGS.with(|settings| *settings.borrow_mut() = parsed);
        Ok(())
    }

    fn select(_: Request, candidates: Vec<Candidate>) -> Result<Vec<u32>, String> {
        SETTINGS.with(|settings| {
            let settings = settings.borrow();
            let mut order: Vec<(i64, u32)> =
                candidates.iter().enumerate().map(|(n, candidate)| (-settings.score(candidate), n as u32)).collect();
            order.sort_unstable();
            Ok(order.into_iter().map(|(_, index)| index).collect())
        })
    }
}

export!(Priority);
