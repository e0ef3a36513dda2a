//! Recompute cost divided by idle time: within 5 % of the lowest.

use kvtier::meta::objects::Facts;

use crate::models::compare;
use crate::models::rich::{self, Recent, State, compare_rich};

const WITHIN: f64 = 1.05;

struct Pensieve {
    cell: fn(&Facts) -> bool,
    layers: bool,
    positions: bool,
    time: bool,
}

impl Pensieve {
    fn value(&self, facts: &Facts, used: i64, now: i64) -> f64 {
        let (l, n) = (f64::from(facts.context), f64::from(facts.tokens.max(1)));
        let own = (facts.cost > 0.0).then_some(f64::from(facts.cost));
        let cost = if (self.cell)(facts) {
            let layers = f64::from(facts.layers);
            let layer = match facts.layers {
                0 => 1.0,
                _ if self.layers => ((layers - f64::from(facts.layer)) / layers).max(0.0),
                _ => 1.0,
            };
            let position = match facts.chunks {
                0 => 1.0,
                n if self.positions => (f64::from(facts.chunk + 1) / f64::from(n)).min(1.0),
                _ => 1.0,
            };
            layer * position * own.unwrap_or(0.001 * l + 0.01 + 0.005)
        } else {
            own.unwrap_or(n * 0.01 + 0.001 * (n * l + n * n / 2.0) + 0.005)
        };
        if self.time { cost / ((now - used) as f64 / 1e9).max(0.001) } else { cost }
    }
}

fn check_close(got: Option<f64>, least: Option<f64>) -> Result<(), String> {
    match (got, least) {
        (None, None) => Ok(()),
        (Some(got), Some(least)) if got <= least * WITHIN => Ok(()),
        _ => Err(format!("the least is {least:?}, not {got:?}")),
    }
}

impl rich::Model for Pensieve {
    fn judge(&mut self, state: &State, got: Option<u64>, _by: &str) -> Result<(), String> {
        let value = |o: &rich::Object| self.value(&o.facts, o.used, state.now);
        let least = state.free().map(|(_, o)| value(o)).min_by(f64::total_cmp);
        check_close(got.map(|id| value(&state.objects[&id])), least)
    }
}

#[test]
fn pensieve_with_facts_matches_its_model() {
    let named: fn(&Facts) -> bool = |facts| facts.layers > 0;
    for (spec, cell, layers, positions, time) in [
        ("pensieve", named, true, true, true),
        ("pensieve(mode=cell,layer_weight=false)", |_| true, false, true, true),
        ("pensieve(mode=cell,position_weight=false)", |_| true, true, false, true),
        ("pensieve(mode=chunk)", |_| false, true, true, true),
        ("pensieve(time_weight=false)", named, true, true, false),
    ] as [(_, fn(&Facts) -> bool, _, _, _); 5]
    {
        compare_rich(spec, || Pensieve { cell, layers, positions, time });
    }
}

/// Without facts every object costs the same: the victim is the least recently used object.
#[test]
fn pensieve_matches_its_model() {
    compare("pensieve", 0, |_| Box::<Recent>::default());
}
