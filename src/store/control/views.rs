//! Views of a store as JSON.

use crate::base::exposition::{Kind, Row, Value};
use crate::base::json_out::Json;
use crate::base::status::Status;
use crate::policy::log::Entry;
use crate::policy::registry;
use crate::store::counters::{RemoteStats, StoreStats};
use crate::store::state::shadow::Score;
use crate::store::state::snapshot::{SessionSnapshot, ShadowSnapshot, TableSnapshot, TierSnapshot};
use crate::store::state::stats::Tenant;
use crate::store::state::stats::{Latency, TIMED};
use crate::store::state::stats::{PolicyGauge, QueueGauge, Report};
use crate::store::state::transfer::EndedTransfers;

/// Name, limit and use, and policy of each tier.
pub(super) type Tiers = Vec<(&'static str, TierSnapshot, String)>;

/// Writes limits and use of tiers.
pub(super) fn budget(json: &mut Json, all: &Tiers) {
    for (name, tier, policy) in all {
        json.key(name).object(|json| {
            json.key("policy").text(policy);
            json.key("limit_bytes").whole(tier.limit_bytes);
            json.key("used_bytes").whole(tier.used_bytes);
            json.key("live_bytes").whole(tier.live_bytes);
            json.key("high_bytes").whole(tier.marks_bytes[0]);
            json.key("low_bytes").whole(tier.marks_bytes[1]);
        });
    }
}

/// Writes the statistics of a store.
pub(super) fn stats(
    json: &mut Json,
    all: &Report,
    remote: Option<RemoteStats>,
    (tenants, others): (&[Tenant], Tenant),
    inspect: &Tiers,
) {
    json.object(|json| {
        json.key("version").text(env!("CARGO_PKG_VERSION"));
        json.key("pid").whole(std::process::id());
        json.key("hit_ratio").real(all.stats.hit_ratio());
        json.key("host_hit_ratio").real(all.stats.host_hit_ratio());
        json.key("write_amplification").real(all.stats.write_amplification());
        json.key("counters").object(|json| rows(json, StoreStats::ROWS, Kind::Counter, &all.stats));
        if let Some(remote) = remote {
            json.key("remote").object(|json| {
                rows(json, RemoteStats::ROWS, Kind::Gauge, &remote);
                rows(json, RemoteStats::ROWS, Kind::Counter, &remote);
            });
        }
        json.key("latencies").object(|json| {
            for ((name, _), one) in TIMED.iter().zip(&all.latencies) {
                json.key(name).object(|json| latency(json, one));
            }
        });
        json.key("tiers").object(|json| budget(json, inspect));
        rows(json, StoreStats::ROWS, Kind::Gauge, &all.stats);
        json.key("queues").object(|json| {
            json.key("copies").object(|json| queue(json, &all.copies));
            json.key("reads").object(|json| queue(json, &all.reads));
        });
        json.key("policies").object(|json| {
            json.key("host").object(|json| policy(json, &all.host_policy));
            if !all.disk_policy.name.is_empty() {
                json.key("disk").object(|json| policy(json, &all.disk_policy));
            }
            if !all.device_policy.name.is_empty() {
                json.key("device").object(|json| policy(json, &all.device_policy));
            }
        });
        json.key("tenants").list(|json| {
            for row in tenants {
                json.object(|json| {
                    json.key("tenant").whole(row.id);
                    tenant(json, row);
                });
            }
        });
        json.key("other_tenants").object(|json| tenant(json, &others));
    });
}

/// Writes the rows of a kind.
fn rows<T>(json: &mut Json, rows: &[Row<T>], kind: Kind, all: &T) {
    for row in rows.iter().filter(|row| row.kind == kind) {
        match (row.get)(all) {
            Value::Whole(whole) => json.key(row.name).whole(whole),
            Value::Real(real) => json.key(row.name).real(real),
        }
    }
}

fn latency(json: &mut Json, all: &Latency) {
    for (name, value) in [
        ("count", all.count),
        ("mean_ns", all.mean_ns),
        ("p50_ns", all.p50_ns),
        ("p99_ns", all.p99_ns),
        ("max_ns", all.max_ns),
    ] {
        json.key(name).whole(value);
    }
}

fn queue(json: &mut Json, all: &QueueGauge) {
    json.key("cells").list(|json| all.cells.iter().for_each(|&n| json.whole(n)));
    json.key("bytes").list(|json| all.bytes.iter().for_each(|&n| json.whole(n)));
    json.key("batches").whole(all.batches);
    json.key("batch_bytes").whole(all.batch_bytes);
    json.key("bytes_per_second").real(all.bytes_per_second);
    json.key("delay_ns").real(all.delay_ns);
}

fn policy(json: &mut Json, all: &PolicyGauge) {
    json.key("name").text(all.name);
    json.key("hit_ratio").real(all.hit_ratio());
    for (name, value) in [
        ("objects", all.objects),
        ("references", all.references),
        ("hits", all.hits),
        ("evictions", all.evictions),
        ("decisions", all.decisions),
        ("shortfalls", all.shortfalls),
    ] {
        json.key(name).whole(value);
    }
    json.key("decision").object(|json| latency(json, &all.decision));
}

fn tenant(json: &mut Json, row: &Tenant) {
    json.key("put_bytes").whole(row.put_bytes);
    json.key("got_bytes").whole(row.got_bytes);
    json.key("hits").whole(row.hits);
    json.key("misses").whole(row.misses);
    json.key("rejected_puts").whole(row.rejected_puts);
}

/// Writes a session.
pub(super) fn session(json: &mut Json, one: &SessionSnapshot) {
    json.object(|json| {
        json.key("session").whole(one.number);
        json.key("serial").whole(one.serial);
        json.key("namespace").whole(one.namespace);
        json.key("tenant").whole(one.tenant);
        match one.priority {
            Some(priority) => json.key("priority").whole(priority),
            None => json.key("priority").null(),
        }
        json.key("tokens").whole(one.tokens);
        json.key("chunks").whole(one.chunks);
        json.key("layers").whole(one.layers);
    });
}

/// Writes the residency of a session's cells.
pub(super) fn table(json: &mut Json, snapshot: &TableSnapshot) {
    json.object(|json| {
        session(json.key("session"), &snapshot.session);
        json.key("first_chunk").whole(snapshot.first_chunk);
        json.key("rows").list(|json| snapshot.rows.iter().for_each(|row| json.text(row)));
    });
}

/// Writes recent evictions.
pub(super) fn evictions(json: &mut Json, all: &[(&'static str, Vec<Entry>)], now_ns: u64) {
    let now_ns = i64::try_from(now_ns).unwrap_or(i64::MAX);
    for (tier, entries) in all {
        json.key(tier).list(|json| {
            for entry in entries {
                let by = registry::ENTRIES.get(entry.policy as usize);
                json.object(|json| {
                    json.key("number").whole(entry.number);
                    json.key("ago_ns").signed(now_ns.saturating_sub(entry.at_ns));
                    json.key("chunk").text(&format!("{:016x}", entry.id));
                    match entry.has_session {
                        0 => json.key("session_serial").null(),
                        _ => json.key("session_serial").whole(entry.session),
                    }
                    json.key("unused_ns").signed(entry.at_ns.saturating_sub(entry.stamp_ns));
                    json.key("score").real(entry.score);
                    json.key("blocks").whole(entry.units);
                    json.key("uses").whole(entry.hits);
                    json.key("policy").text(by.map_or("", |by| by.name));
                });
            }
        });
    }
}

/// Writes ended transfers.
pub(super) fn transfers(json: &mut Json, seen: &EndedTransfers, now_ns: u64) {
    const KINDS: [&str; 3] = ["put", "get", "prefetch"];
    const LEVELS: [&str; 4] = ["ram", "disk", "durable", "remote"];
    json.object(|json| {
        json.key("run").text(&format!("{:016x}", seen.run));
        json.key("now_ns").whole(now_ns);
        json.key("next").whole(seen.next);
        json.key("missed").whole(seen.missed);
        json.key("transfers").list(|json| {
            for one in &seen.all {
                let status = Status::from_code(one.status).unwrap_or(Status::State);
                json.object(|json| {
                    json.key("number").whole(one.number);
                    let kind = KINDS.get(usize::from(one.kind)).copied().unwrap_or_default();
                    json.key("kind").text(if one.is_lookup == 1 { "lookup" } else { kind });
                    match LEVELS.get(usize::from(one.level)) {
                        Some(level) if kind == "put" => json.key("level").text(level),
                        _ => json.key("level").null(),
                    }
                    json.key("status").text(status.name());
                    match one.session {
                        0 => json.key("session_serial").null(),
                        serial => json.key("session_serial").whole(serial),
                    }
                    json.key("read_disk").flag(one.read_disk == 1);
                    for (name, value) in [
                        ("began_ns", one.began_ns),
                        ("ended_ns", one.ended_ns),
                        ("tenant", one.tenant.into()),
                        ("chunks", one.chunks.into()),
                        ("layers", one.layers.into()),
                        ("tokens", one.tokens),
                        ("bytes", one.bytes),
                        ("missed_cells", one.missed_cells.into()),
                    ] {
                        json.key(name).whole(value);
                    }
                });
            }
        });
    });
}

/// Writes the scores of a shadow evaluation.
pub(super) fn ab(json: &mut Json, tier: &str, snapshot: &ShadowSnapshot) {
    json.key("tier").text(tier);
    json.key("running").flag(snapshot.is_on);
    json.key("elapsed_ns").whole(snapshot.elapsed_ns);
    json.key("left_ns").whole(snapshot.left_ns);
    json.key("policies").list(|json| snapshot.scores.iter().for_each(|one| score(json, one)));
}

fn score(json: &mut Json, one: &Score) {
    json.object(|json| {
        let counts = &one.counts;
        json.key("policy").text(&one.spec);
        json.key("live").flag(one.is_live);
        json.key("hit_ratio").real(counts.hit_ratio());
        json.key("token_hit_ratio").real(counts.token_hit_ratio());
        json.key("re_prefill_rate").real(counts.re_prefill_rate());
        json.key("session_fairness").real(one.fairness[0]);
        json.key("tenant_fairness").real(one.fairness[1]);
        for (name, value) in [
            ("requests", counts.requests),
            ("references", counts.references),
            ("hits", counts.hits),
            ("evicted_references", counts.evicted_references),
            ("evictions", counts.evictions),
            ("chunks", one.objects),
            ("decisions", counts.decisions),
            ("timed_decisions", one.timed),
            ("decision_mean_ns", one.mean_ns),
            ("decision_p99_ns", one.p99_ns),
        ] {
            json.key(name).whole(value);
        }
    });
}
