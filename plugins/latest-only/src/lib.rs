//! A filter: of all messages that are visible in a partition only the newest is
//! delivered, the others are passed over. For lanes that carry states, not events.

wit_bindgen::generate!({ path: "../../wit/v1", world: "filter" });

use exports::waspmq::plugin::message_filter::{Context, Guest, Message, Verdict};

struct LatestOnly;

impl Guest for LatestOnly {
    fn init(settings: Vec<(String, String)>) -> Result<(), String> {
        match settings.first() {
            None => Ok(()),
            Some((key, _)) => Err(format!("latest-only has no settings, got \"{key}\"")),
        }
    }

    fn filter(context: Context, messages: Vec<Message>) -> Result<Vec<Verdict>, String> {
        let mut verdicts = vec![Verdict::Skip; messages.len()];
        // There are newer ones behind these: even the last of them is out of date.
        if let Some(last) = verdicts.last_mut().filter(|_| !context.more) {
            *last = Verdict::Deliver;
        }
        Ok(verdicts)
    }
}

export!(LatestOnly);
