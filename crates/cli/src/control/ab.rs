//! `kvtier ab`: shadow evaluation of policies beside the live one.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use kvtier::base::spec::Spec;
use serde_json::Value;

use super::client::Client;
use super::show::{comparison, number, time};
use super::{Outcome, Target, Tier};

/// Starts the evaluation, waits for its end, and prints the results.
pub fn run(at: &Target, policies: &Spec, seconds: u64, tier: Tier) -> Outcome<()> {
    let tier = tier.name();
    let request = format!("ab(policies={policies},seconds={seconds},tier={tier})");
    let mut client = Client::connect(&at.socket)?;
    let mut snapshot: Value = serde_json::from_str(&client.request(&request)?)?;
    let shows = !at.json && std::io::stderr().is_terminal();
    while snapshot.get("running").and_then(Value::as_bool) == Some(true) {
        let left = Duration::from_nanos(number(&snapshot, "left_ns"));
        if shows {
            eprint!("\r{} left \x1b[K", time(left.as_nanos() as f64));
            std::io::stderr().flush()?;
        }
        // Slightly longer than the remaining time, so that the last poll finds it ended.
        std::thread::sleep((left + Duration::from_millis(5)).min(Duration::from_secs(1)));
        snapshot = serde_json::from_str(&client.request(&format!("ab-read(tier={tier})"))?)?;
    }
    if shows {
        eprint!("\r\x1b[K");
    }
    let text = client.request(&format!("ab-end(tier={tier})"))?;
    match at.json {
        true => println!("{text}"),
        false => comparison(&serde_json::from_str(&text)?),
    }
    Ok(())
}
