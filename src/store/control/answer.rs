//! Answers to requests, as JSON. A view is taken under the store's lock and written without it.

use crate::base::budget::Tier;
use crate::base::json_out::Json;
use crate::base::machine::random_bytes;
use crate::base::spec::Spec;
use crate::base::status::{Error, Result, Status};
use crate::store::control::Request;
use crate::store::control::views::{self, Tiers};
use crate::store::state::StoreState;
use crate::store::state::shadow::Shadow;
use crate::store::state::snapshot::ShadowSnapshot;

const TIERS: [Tier; 3] = [Tier::Host, Tier::Disk, Tier::Device];

/// A store that requests are made to.
pub trait Subject {
    /// Reads the state under its lock.
    fn inspect(&self, read: &mut dyn FnMut(&StoreState)) -> Result<()>;
    /// Changes the state under its lock.
    fn change(&self, act: &mut dyn FnMut(&mut StoreState) -> Result<()>) -> Result<()>;
}

/// Executes a request and returns its answer.
pub fn answer(store: &dyn Subject, line: &str) -> Result<String> {
    let request = Request::parse(line)?;
    let mut json = Json::default();
    match request {
        Request::Stats => {
            let inspect = inspect(store, |core| {
                let tenants = (core.tenants().to_vec(), core.other_tenants());
                (core.report(), core.remote_stats(), tenants, tiers(core))
            })?;
            let (report, remote, (tenants, others), tiers) = &inspect;
            views::stats(&mut json, report, *remote, (tenants, *others), tiers);
        }
        Request::Metrics => return inspect(store, StoreState::metrics_text),
        Request::Sessions { most } => {
            let all = inspect(store, |core| core.sessions_seen(most))??;
            json.object(|json| {
                json.key("sessions")
                    .list(|json| all.iter().for_each(|one| views::session(json, one)));
            });
        }
        Request::ChunkTable { session, first, chunks } => {
            let snapshot = inspect(store, |core| core.table_snapshot(session, first, chunks))??;
            views::table(&mut json, &snapshot);
        }
        Request::Evictions { tier, tail } => evictions(store, &mut json, tier, tail)?,
        Request::Transfers { from, most } => {
            let run = u64::from_le_bytes(random_bytes()?);
            let (seen, now_ns) =
                changed(store, |core| Ok((core.ended_transfers(from, most, run)?, core.now_ns())))?;
            views::transfers(&mut json, &seen, now_ns);
        }
        Request::SetPolicy { tier, policy } => set_policy(store, &mut json, tier, &policy)?,
        Request::Budget { host, disk } => {
            store.change(&mut |core| resize(core, host, disk))?;
            let all = inspect(store, tiers)?;
            json.object(|json| views::budget(json, &all));
        }
        Request::Ab { tier, policies, seconds } => {
            let snapshot = begin_shadow(store, tier, &policies, seconds)?;
            json.object(|json| views::ab(json, tier.name(), &snapshot));
        }
        Request::AbRead { tier } => {
            let snapshot = changed(store, |core| core.shadow_snapshot(tier))?;
            json.object(|json| views::ab(json, tier.name(), &snapshot));
        }
        Request::AbEnd { tier } => {
            let snapshot = changed(store, |core| core.end_shadow(tier))?;
            json.object(|json| views::ab(json, tier.name(), &snapshot));
        }
    }
    Ok(json.into_text())
}

/// Recent evictions; without a disk those of host memory only.
fn evictions(store: &dyn Subject, json: &mut Json, only: Option<Tier>, tail: usize) -> Result<()> {
    let mut all = Vec::new();
    for tier in TIERS.into_iter().filter(|tier| only.is_none_or(|only| only == *tier)) {
        match inspect(store, |core| core.evictions(tier, tail))? {
            Err(error) if error.status() == Status::NotFound && only.is_none() => {}
            entries => all.push((tier.name(), entries?)),
        }
    }
    let now_ns = inspect(store, StoreState::now_ns)?;
    json.object(|json| views::evictions(json, &all, now_ns));
    Ok(())
}

fn set_policy(store: &dyn Subject, json: &mut Json, tier: Tier, policy: &str) -> Result<()> {
    let (before, now) = changed(store, |core| {
        let before = core.policy(tier)?.to_string();
        core.set_policy(tier, policy)?;
        Ok((before, core.policy(tier)?.to_string()))
    })?;
    json.object(|json| {
        json.key("tier").text(tier.name());
        json.key("before").text(&before);
        json.key("policy").text(&now);
    });
    Ok(())
}

/// Opens the shadow policies without the lock. They miss the accesses made meanwhile.
fn begin_shadow(
    store: &dyn Subject,
    tier: Tier,
    policies: &[Spec],
    seconds: u64,
) -> Result<ShadowSnapshot> {
    let plan = changed(store, |core| core.plan_shadow(tier))?;
    let mut shadow = Some(Shadow::open(&plan, policies, seconds)?);
    changed(store, |core| {
        shadow.take().map_or(Ok(()), |shadow| core.begin_shadow(tier, shadow))?;
        core.shadow_snapshot(tier)
    })
}

fn changed<R>(store: &dyn Subject, mut act: impl FnMut(&mut StoreState) -> Result<R>) -> Result<R> {
    let mut done = None;
    store.change(&mut |core| {
        done = Some(act(core)?);
        Ok(())
    })?;
    done.ok_or_else(|| Error::from(Status::State))
}

fn inspect<R>(store: &dyn Subject, mut read: impl FnMut(&StoreState) -> R) -> Result<R> {
    let mut found = None;
    store.inspect(&mut |core| found = Some(read(core)))?;
    found.ok_or_else(|| Error::from(Status::State))
}

/// Changes both limits, or none if one of them is refused.
fn resize(core: &mut StoreState, host: Option<u64>, disk: Option<u64>) -> Result<()> {
    let before = core.tier_seen(Tier::Host)?.limit_bytes;
    if let Some(bytes) = host {
        core.set_host_bytes(bytes)?;
    }
    let Some(bytes) = disk else { return Ok(()) };
    core.set_disk_bytes(bytes).inspect_err(|_| {
        if host.is_some()
            && let Err(error) = core.set_host_bytes(before)
        {
            log::warn!("the limit of host memory was changed, that of the disk was not: {error}");
        }
    })
}

fn tiers(core: &StoreState) -> Tiers {
    let tier = |tier: Tier| {
        let policy = core.policy(tier).ok()?.to_string();
        Some((tier.name(), core.tier_seen(tier).ok()?, policy))
    };
    TIERS.into_iter().filter_map(tier).collect()
}
