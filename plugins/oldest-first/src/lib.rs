//! A selector: the partition whose oldest message has waited longest comes first.

wit_bindgen::generate!({ path: "../../wit/v1", world: "selector" });

use exports::waspmq::plugin::candidate_selector::{Candidate, Guest, Request};

struct OldestFirst;

impl Guest for OldestFirst {
    fn init(settings: Vec<(String, String)>) -> Result<(), String> {
        match settings.first() {
            None => Ok(()),
            Some((key, _)) => Err(format!("oldest-first has no settings, got \"{key}\"")),
        }
    }

    fn select(_: Request, candidates: Vec<Candidate>) -> Result<Vec<u32>, String> {
        let mut order: Vec<u32> = (0..candidates.len() as u32).collect();
        // Stable: of two that have waited equally long, the one that was ready first.
        order.sort_by_key(|index| std::cmp::Reverse(candidates[*index as usize].oldest_age_ms));
        Ok(order)
    }
}

export!(OldestFirst);
